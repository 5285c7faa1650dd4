"""The flags of `sglang.launch_server` that are derived from a launch. Each flag is one entry of FLAGS.

The tests compare the flag names with the option list recorded from the parser of SGLang 0.5.23.
"""

from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from dps_engines.flags import Flag, Value, sources
from dps_engines.launch import (
    DEFAULT_NGRAM_TOKENS,
    DEFAULT_STEPS,
    DEFAULT_TOP_K,
    OTHER_GPUS,
    WITHOUT_DRAFT_MODEL,
    Algorithm,
    Launch,
    Speculation,
)


def otlp_endpoint(launch: Launch) -> str | None:
    """The receiver as SGLang expects it: host:port for gRPC, the full URL of the traces endpoint for HTTP.

    SGLang passes the value to the exporter unchanged, and the HTTP exporter appends no path to it.
    """
    if launch.traces is None:
        return None
    url = urlsplit(launch.traces.endpoint)
    if launch.traces.protocol == "grpc":
        return url.netloc
    return f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}/v1/traces"


def _of(value: Callable[[Speculation], Value]) -> Callable[[Launch], Value]:
    """The value of a flag that is set only with speculative decoding."""
    return lambda launch: None if launch.speculation is None else value(launch.speculation)


def _of_draft(value: Callable[[Speculation], Value]) -> Callable[[Launch], Value]:
    """The value of a flag that is set only with a draft model."""
    return _of(
        lambda speculation: None if speculation.algorithm in WITHOUT_DRAFT_MODEL else value(speculation)
    )


def _steps(speculation: Speculation) -> int:
    return speculation.steps or DEFAULT_STEPS


def _top_k(speculation: Speculation) -> int:
    return speculation.top_k or DEFAULT_TOP_K


def _draft_tokens(speculation: Speculation) -> int:
    """Tokens in the input of a verification step: the draft tokens, and the last token of the previous step.

    The default, steps * topK + 1, is not larger than the draft tree for any settings.
    """
    if speculation.algorithm == "Ngram":
        return speculation.draft_tokens or DEFAULT_NGRAM_TOKENS
    return speculation.draft_tokens or _steps(speculation) * _top_k(speculation) + 1


_TELEMETRY = "spec.telemetry.otlpEndpoint"
_SPECULATION = "spec.pools.speculative.speculation"

FLAGS: tuple[Flag, ...] = (
    Flag("--model-path", "spec.model.name", lambda launch: launch.location, ("--model",)),
    Flag("--served-model-name", "spec.model.servedName", lambda launch: launch.served_name),
    Flag("--tokenizer-path", "spec.model.tokenizer", lambda launch: launch.tokenizer),
    Flag("--revision", "spec.model.revision", lambda launch: launch.revision),
    Flag("--host", "the operator", lambda launch: launch.host),
    Flag("--port", "the operator", lambda launch: launch.port),
    Flag(
        "--tp-size",
        "spec.engine.tensorParallel",
        lambda launch: launch.tensor_parallel,
        ("--tensor-parallel-size",),
    ),
    Flag("--enable-metrics", "the operator", lambda _: True),
    Flag("--enable-cache-report", "the operator", lambda _: True),
    Flag("--enable-trace", _TELEMETRY, lambda launch: launch.traces is not None),
    Flag("--otlp-traces-endpoint", _TELEMETRY, otlp_endpoint),
    Flag(
        "--speculative-algorithm",
        f"{_SPECULATION}.algorithm",
        _of(lambda speculation: speculation.algorithm.upper()),
    ),
    Flag(
        "--speculative-draft-model-path",
        f"{_SPECULATION}.draftModel",
        _of_draft(Speculation.required_draft_model),
        ("--speculative-draft-model",),
    ),
    Flag("--speculative-num-steps", f"{_SPECULATION}.steps", _of_draft(_steps)),
    Flag("--speculative-eagle-topk", f"{_SPECULATION}.topK", _of_draft(_top_k)),
    Flag("--speculative-num-draft-tokens", f"{_SPECULATION}.draftTokens", _of(_draft_tokens)),
    Flag(
        "--lora-paths",
        "spec.model.adapters",
        lambda launch: [f"{adapter.name}={adapter.path}" for adapter in launch.adapters],
    ),
)

MANAGED = sources(FLAGS)
"""Flags that a user may not pass, and the field that sets each; aliases included."""

UNSUPPORTED = {
    "--api-key": "the gateway does not know this key, so an engine with this flag would answer every request with 401; "
    "in a DPSRouter, set spec.engine.apiKeySecretRef",
    "--chat-template": "the gateway counts prompts with the chat template of the tokenizer, so its ΔL could differ "
    "from the engine's; store the template with a tokenizer, and set spec.model.tokenizer",
    "--pp-size": OTHER_GPUS,
    "--pipeline-parallel-size": OTHER_GPUS,
    "--nnodes": OTHER_GPUS,
}
"""Flags that break the deployment, and why."""

UNSUPPORTED_WITHOUT_DP_ATTENTION = {"--dp-size": OTHER_GPUS, "--data-parallel-size": OTHER_GPUS}
"""Flags that are refused without --enable-dp-attention, because they then multiply the engine's GPUs, and why."""

DP_ATTENTION = "--enable-dp-attention"
"""The flag with which the attention is not split across all GPUs of the engine."""

ENABLE_LORA = "--enable-lora"
"""The flag with which adapters can be loaded while the engine runs."""

ALGORITHMS_WITH_ADAPTERS: tuple[Algorithm, ...] = ("Eagle", "Eagle3", "Ngram")
"""The algorithms with which SGLang starts if it has LoRA adapters."""


ABBREVIATIONS = {"--tp": "--tp-size", "--speculative-algo": "--speculative-algorithm"}
"""Short names that SGLang declares for managed flags.

SGLang's parser also accepts any unambiguous prefix of a flag, so prefixes of managed flags are refused as well.
"""


def unsupported(argument: str, flags: Mapping[str, str] = UNSUPPORTED) -> str | None:
    """Why a flag, or the flag that it abbreviates, is not supported; None if it is supported."""
    name = argument.split("=", 1)[0]
    if len(name) <= len("--"):
        return None
    return next((reason for flag, reason in flags.items() if flag.startswith(name)), None)


def managed_by(argument: str, managed: Mapping[str, str] = MANAGED) -> str | None:
    """The field that sets this flag, or the flag that it abbreviates; None if the user may set it."""
    name = argument.split("=", 1)[0]
    if not name.startswith("--"):
        return None
    name = ABBREVIATIONS.get(name, name)
    return next((source for flag, source in managed.items() if flag.startswith(name)), None)
