"""Two SGLang servers on one machine: their command lines, by the operator's own builder, and their GPUs. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dps_operator.api.spec import Spec, parse
from dps_operator.builders.engine import POOLS, PoolName, pool_of
from dps_operator.builders.engine_args import ENVIRONMENT, check_args, engine_args
from dps_operator.errors import SpecError

Algorithm = Literal["Standalone", "Eagle", "Eagle3", "Ngram"]
ALGORITHMS: tuple[Algorithm, ...] = ("Standalone", "Eagle", "Eagle3", "Ngram")

SHARED_MEMORY: dict[PoolName, float] = {"speculative": 0.45, "greedy": 0.8}
"""--mem-fraction-static where both share a GPU: of the memory that is free when the engine starts, so that
the second one's is 0.8 of what the first has left."""

CPU = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--disable-overlap-schedule", "--skip-server-warmup",
    "--mem-fraction-static", "0.3", "--max-total-tokens", "40000",
    "--sleep-on-idle",  # an idle scheduler would otherwise spin on a core
)  # fmt: skip
CPU_SPECULATION = ("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx")
"""torch_native cannot verify drafts."""


@dataclass(frozen=True)
class SGLangOptions:
    """What both servers are to be.

    model, draft_model: hub ids or folders. steps, top_k, draft_tokens: of the speculation; None is the
    operator's default. tensor_parallel: GPUs of each server. arguments: added to both command lines.
    python: an interpreter that has SGLang. version: of that SGLang; None skips the check that it is supported.
    """

    model: str
    draft_model: str | None = None
    algorithm: Algorithm = "Standalone"
    steps: int | None = None
    top_k: int | None = None
    draft_tokens: int | None = None
    tensor_parallel: int = 1
    arguments: Sequence[str] = ()
    python: str = "python3"
    version: str | None = None


@dataclass(frozen=True)
class Placement:
    """Where one server runs: on these GPUs, or on the CPU if there are none; shared: with the other server."""

    gpus: Sequence[str]
    shared: bool = False

    def __str__(self) -> str:
        if not self.gpus:
            return "on the CPU, for a try"
        return f"on GPU {', '.join(self.gpus)}{', which both share' if self.shared else ''}"


@dataclass(frozen=True)
class EngineCommand:
    """A process to start: its command line, and what its environment has beside this process's own."""

    command: Sequence[str]
    environment: Mapping[str, str]


def place(gpus: Sequence[str], tensor_parallel: int) -> dict[PoolName, Placement]:
    """GPUs of its own for each server if there are enough, else the same for both; without any, the CPU.

    Raises SpecError if there are fewer than one server needs.
    """
    if not gpus:
        return {name: Placement(()) for name in POOLS}
    first, second = gpus[:tensor_parallel], gpus[tensor_parallel : 2 * tensor_parallel]
    if len(first) < tensor_parallel:
        raise SpecError(f"--tensor-parallel {tensor_parallel} needs as many GPUs; there are {len(gpus)}")
    if len(second) < tensor_parallel:
        return {name: Placement(first, shared=True) for name in POOLS}
    return {"speculative": Placement(first), "greedy": Placement(second)}


def sglang_command(
    options: SGLangOptions,
    pool: PoolName,
    placement: Placement,
    *,
    port: int,
    served_name: str,
    otlp_endpoint: str | None = None,
) -> EngineCommand:
    """How a pool's server is started, on 127.0.0.1. otlp_endpoint: where its spans go, by gRPC.

    Raises SpecError with a sentence that says what to change.
    """
    for argument in options.arguments:
        _check_argument(argument)
    spec = _spec(options, pool, placement, served_name, otlp_endpoint)
    arguments = engine_args(spec, pool_of(spec, pool), host="127.0.0.1", port=port)
    environment = ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ",".join(placement.gpus)}
    if not placement.gpus:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    if otlp_endpoint is not None:
        environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "grpc"
    return EngineCommand([options.python, "-m", "sglang.launch_server", *arguments], environment)


def _check_argument(argument: str) -> None:
    try:
        check_args([argument], "", greedy=True)
    except SpecError as error:
        name = argument.split("=", 1)[0]
        raise SpecError(f"-- {name}: dps up has an option of its own for this, or sets it itself") from error


def _spec(
    options: SGLangOptions, pool: PoolName, placement: Placement, served_name: str, otlp_endpoint: str | None
) -> Spec:
    speculation: dict[str, Any] = {
        "algorithm": options.algorithm,
        "draftModel": options.draft_model,
        "steps": options.steps,
        "topK": options.top_k,
        "draftTokens": options.draft_tokens,
    }
    # The last of two equal arguments counts, so the user's come after ours.
    arguments = [*_placement_args(pool, placement), *options.arguments]
    return parse(
        {
            "model": {"name": options.model, "servedName": served_name},
            "engine": {"version": options.version, "tensorParallel": options.tensor_parallel},
            "pools": {
                "speculative": {"speculation": speculation, "args": arguments},
                "greedy": {"args": arguments},
            },
            "telemetry": {"otlpEndpoint": otlp_endpoint},
        }
    )


def _placement_args(pool: PoolName, placement: Placement) -> list[str]:
    if not placement.gpus:
        return [*CPU, *(CPU_SPECULATION if pool == "speculative" else ())]
    return ["--mem-fraction-static", str(SHARED_MEMORY[pool])] if placement.shared else []
