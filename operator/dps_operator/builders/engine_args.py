"""The command line of SGLang: what each pool is started with, and what of a user's clashes."""

import re
from urllib.parse import urlsplit

from dps_operator.api.model import DEFAULT_ENGINE_REPOSITORY, DEFAULT_ENGINE_VERSION, Engine
from dps_operator.api.pools import (
    DEFAULT_NGRAM_TOKENS,
    DEFAULT_STEPS,
    DEFAULT_TOP_K,
    PoolSpec,
    Speculation,
    SpeculativePoolSpec,
)
from dps_operator.api.spec import Spec
from dps_operator.errors import SpecError

PORT = 30000
ENVIRONMENT = {
    # /health generates a token unless told not to, and a busy engine would be late with it. SGLang's own
    # watchdog ends a scheduler that hangs.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
"""What every engine finds in its environment."""
OLDEST = (0, 5, 8)
"""The oldest version whose arguments were checked against the engine's own parser."""

MANAGED = {
    "--model-path": "spec.model.name",
    "--model": "spec.model.name",
    "--served-model-name": "spec.model.servedName",
    "--host": "the operator",
    "--port": "the operator",
    "--tp-size": "spec.engine.tensorParallel",
    "--tensor-parallel-size": "spec.engine.tensorParallel",
    "--enable-metrics": "the operator",
    "--enable-cache-report": "the operator",
    "--enable-trace": "spec.telemetry.otlpEndpoint",
    "--otlp-traces-endpoint": "spec.telemetry.otlpEndpoint",
    "--speculative-algorithm": "spec.pools.speculative.speculation.algorithm",
    "--speculative-draft-model-path": "spec.pools.speculative.speculation.draftModel",
    "--speculative-draft-model": "spec.pools.speculative.speculation.draftModel",
    "--speculative-num-steps": "spec.pools.speculative.speculation.steps",
    "--speculative-eagle-topk": "spec.pools.speculative.speculation.topK",
    "--speculative-num-draft-tokens": "spec.pools.speculative.speculation.draftTokens",
}
"""Arguments that a user may not pass, with what sets them; aliases included."""

ABBREVIATIONS = {"--tp": "--tp-size", "--speculative-algo": "--speculative-algorithm"}
"""Short forms in wide use. SGLang's parser takes any unambiguous prefix, so prefixes are refused as well."""


def image(engine: Engine) -> str:
    """The engine's container image."""
    return engine.image or f"{DEFAULT_ENGINE_REPOSITORY}:v{engine.version or DEFAULT_ENGINE_VERSION}"


def version(engine: Engine) -> str:
    """The SGLang version that the arguments are for: as told, from the image's tag, or the default."""
    if engine.version:
        return engine.version
    tag = re.search(r":v?(\d+\.\d+\.\d+(?:\.post\d+)?)[^/]*$", engine.image or "")
    return tag.group(1) if tag else DEFAULT_ENGINE_VERSION


def _check_version(engine: Engine) -> None:
    found = version(engine)
    if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise SpecError(f"spec.engine: SGLang {found} is not supported; use {oldest} or newer")


def _clash(argument: str, *, greedy: bool) -> str | None:
    """What sets this argument, where the user may not; None where they may."""
    name = argument.split("=", 1)[0]
    if not name.startswith("--"):
        return None
    if greedy and name.startswith("--spec"):
        return "spec.pools.speculative, as the greedy pool must not speculate"
    name = ABBREVIATIONS.get(name, name)
    matches = [flag for flag in MANAGED if flag.startswith(name)]
    return MANAGED[matches[0]] if matches else None


def check_args(args: list[str], field: str, *, greedy: bool) -> None:
    """SpecError names the first of a user's arguments that the operator sets itself."""
    for argument in args:
        owner = _clash(argument, greedy=greedy)
        if owner:
            raise SpecError(f"{field}: {argument.split('=', 1)[0]} is set by {owner}; remove it")


def speculation_args(speculation: Speculation) -> list[str]:
    """The speculative arguments of one algorithm. A chain or tree fits its draft tokens: steps * topK + 1."""
    if speculation.algorithm == "Ngram":
        tokens = speculation.draft_tokens or DEFAULT_NGRAM_TOKENS
        return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(tokens)]
    if speculation.draft_model is None:
        raise SpecError(
            f"spec.pools.speculative.speculation.draftModel: {speculation.algorithm} needs it; "
            "set it, or choose Ngram"
        )
    steps, top_k = speculation.steps or DEFAULT_STEPS, speculation.top_k or DEFAULT_TOP_K
    return [
        "--speculative-algorithm",
        speculation.algorithm.upper(),
        "--speculative-draft-model-path",
        speculation.draft_model,
        "--speculative-num-steps",
        str(steps),
        "--speculative-eagle-topk",
        str(top_k),
        "--speculative-num-draft-tokens",
        str(speculation.draft_tokens or steps * top_k + 1),
    ]


def _trace_args(spec: Spec) -> list[str]:
    telemetry = spec.telemetry
    if telemetry.otlp_endpoint is None:
        return []
    url = urlsplit(telemetry.otlp_endpoint)
    # SGLang hands this to the exporter as it is: host:port for gRPC; for HTTP what the gateway's exporter appends too.
    if telemetry.protocol == "grpc":
        endpoint = url.netloc
    else:
        endpoint = f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}/v1/traces"
    return ["--enable-trace", "--otlp-traces-endpoint", endpoint]


def engine_args(spec: Spec, pool: PoolSpec, *, host: str = "0.0.0.0", port: int = PORT) -> list[str]:
    """The whole command line of one pool; a user's arguments come last, those of the pool after the engine's.

    host, port: where it listens. Raises SpecError for an argument that the operator sets, and for a version
    that is not supported.
    """
    greedy = not isinstance(pool, SpeculativePoolSpec)
    _check_version(spec.engine)
    check_args(spec.engine.args, "spec.engine.args", greedy=greedy)
    check_args(pool.args, f"spec.pools.{'greedy' if greedy else 'speculative'}.args", greedy=greedy)
    return [
        "--model-path",
        spec.model.name,
        "--served-model-name",
        spec.model.served_name or spec.model.name,
        "--host",
        host,
        "--port",
        str(port),
        "--tp-size",
        str(spec.engine.tensor_parallel),
        "--enable-metrics",
        "--enable-cache-report",
        *_trace_args(spec),
        *(speculation_args(pool.speculation) if isinstance(pool, SpeculativePoolSpec) else []),
        *spec.engine.args,
        *pool.args,
    ]
