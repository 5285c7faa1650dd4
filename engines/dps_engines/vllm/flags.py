"""The flags of vLLM's OpenAI server that are derived from a launch. Each flag is one entry of FLAGS.

The tests compare the flag names with the option lists recorded from each supported version's own parser.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from dps_engines.flags import Flag, sources
from dps_engines.launch import (
    DEFAULT_NGRAM_TOKENS,
    DEFAULT_STEPS,
    OTHER_GPUS,
    WITHOUT_DRAFT_MODEL,
    Algorithm,
    Launch,
    Speculation,
)

METHODS: Final[Mapping[Algorithm, str]] = {
    "Standalone": "draft_model",
    "Eagle": "eagle",
    "Eagle3": "eagle3",
    "Ngram": "ngram",
    "Suffix": "suffix",
}
"""vLLM's names of the algorithms."""


def _proposed_tokens(speculation: Speculation) -> int | None:
    """Tokens drafted per verification step; None for vLLM's default.

    `draft_tokens` also counts the last token of the previous step.
    """
    if speculation.algorithm not in WITHOUT_DRAFT_MODEL:
        return speculation.steps or DEFAULT_STEPS
    if speculation.draft_tokens is None:
        return DEFAULT_NGRAM_TOKENS - 1 if speculation.algorithm == "Ngram" else None
    return speculation.draft_tokens - 1


def _speculative_config(launch: Launch) -> str | None:
    """The JSON object that configures speculative decoding; None for greedy decoding."""
    speculation = launch.speculation
    if speculation is None:
        return None
    config: dict[str, Any] = {"method": METHODS[speculation.algorithm]}
    if speculation.algorithm not in WITHOUT_DRAFT_MODEL:
        config["model"] = speculation.required_draft_model()
    if (tokens := _proposed_tokens(speculation)) is not None:
        config["num_speculative_tokens"] = tokens
    return json.dumps(config)


def _otlp_endpoint(launch: Launch) -> str | None:
    """The URL that vLLM passes to its exporter: that of the receiver for gRPC, of its traces endpoint for HTTP."""
    if launch.traces is None:
        return None
    if launch.traces.protocol == "grpc":
        return launch.traces.endpoint
    return f"{launch.traces.endpoint.rstrip('/')}/v1/traces"


FLAGS: Final[tuple[Flag, ...]] = (
    Flag("--model", "spec.model.name", lambda launch: launch.location),
    Flag("--served-model-name", "spec.model.servedName", lambda launch: launch.served_name),
    Flag("--tokenizer", "spec.model.tokenizer", lambda launch: launch.tokenizer),
    Flag("--revision", "spec.model.revision", lambda launch: launch.revision),
    Flag("--host", "the operator", lambda launch: launch.host),
    Flag("--port", "the operator", lambda launch: launch.port),
    Flag("--tensor-parallel-size", "spec.engine.tensorParallel", lambda launch: launch.tensor_parallel),
    # The default depends on the model.
    Flag("--enable-prefix-caching", "the operator", lambda _: True),
    # Without this flag, answers do not report cached tokens.
    Flag(
        "--enable-prompt-tokens-details",
        "the operator",
        lambda _: True,
        ("--no-enable-prompt-tokens-details",),
    ),
    Flag("--otlp-traces-endpoint", "spec.telemetry.otlpEndpoint", _otlp_endpoint),
    Flag(
        "--speculative-config",
        "spec.pools.speculative.speculation",
        _speculative_config,
        ("--spec-method", "--spec-model", "--spec-tokens"),
    ),
    # Requests then select an adapter by the same name as with SGLang.
    Flag(
        "--lora-modules",
        "spec.model.adapters",
        lambda launch: [f"{launch.served_name}:{adapter.name}={adapter.path}" for adapter in launch.adapters],
    ),
)

MANAGED: Final = sources(FLAGS)
"""Flags that a user may not pass, and the field that sets each; aliases included."""

UNSUPPORTED: Final = {
    "--api-key": "the gateway does not know this key, so an engine with this flag would answer every request with 401; "
    "in a DPSRouter, set spec.engine.apiKeySecretRef",
    "--chat-template": "the gateway counts prompts with the chat template of the tokenizer, so its ΔL could differ "
    "from the engine's; store the template with a tokenizer, and set spec.model.tokenizer",
    "--config": "flags in a file are not checked",
    "--pipeline-parallel-size": OTHER_GPUS,
    "--data-parallel-size": OTHER_GPUS,
    "--prefill-context-parallel-size": OTHER_GPUS,
    "--nnodes": OTHER_GPUS,
}
"""Flags that break the deployment, and why."""

SHORT: Final = {
    "-tp": "--tensor-parallel-size",
    "-sc": "--speculative-config",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-n": "--nnodes",
}
"""Short names of managed and unsupported flags."""


def flag_name(argument: str) -> str:
    """The name of a flag in the form of FLAGS.

    vLLM also accepts underscores instead of hyphens, a member of a JSON value after a dot, and short names.
    """
    name = argument.split("=", 1)[0].split(".", 1)[0]
    return name.replace("_", "-") if name.startswith("--") else SHORT.get(name, name)


def matching(argument: str, found: Mapping[str, str]) -> str | None:
    """The entry of the flag, or of one that it abbreviates, as vLLM's parser accepts; None if there is none."""
    name = flag_name(argument)
    if not name.startswith("--") or name == "--":
        return None
    return next((entry for flag, entry in found.items() if flag.startswith(name)), None)
