"""Command lines and GPUs of two SGLang servers on one machine."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dps_engines.launch import Algorithm, EngineError, Launch, MooncakeCache, Speculation, Traces
from dps_engines.pools import POOLS, PoolName
from dps_engines.registry import RUNTIMES
from dps_engines.sglang.flags import unsupported
from dps_sglang.compatibility import VERSIONS

SGLANG = RUNTIMES["SGLang"]

SHARED_MEMORY: dict[PoolName, float] = {"speculative": 0.45, "greedy": 0.8}
"""--mem-fraction-static if both servers share GPUs. It is a fraction of the memory that is free when a server
starts: the greedy one starts second and takes 0.8 of what the speculative one has left."""

CPU = (
    "--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native",
    "--sampling-backend", "pytorch", "--disable-overlap-schedule", "--skip-server-warmup",
    "--mem-fraction-static", "0.3", "--max-total-tokens", "40000",
    "--sleep-on-idle",  # without it, an idle scheduler occupies a core
)  # fmt: skip
CPU_SPECULATION = ("--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx")
"""Additional arguments for speculative decoding on a CPU, where torch_native cannot verify drafts."""

OPTIONS_OF_FIELDS = {"spec.engine.tensorParallel": "--tensor-parallel", "spec.model.tokenizer": "--tokenizer"}
"""The options of `dps up` for fields of a DPSRouter that messages name."""


@dataclass(frozen=True)
class SGLangOptions:
    """The options of both servers.

    model, draft_model: Hub ids or folders.
    steps, top_k, draft_tokens: settings of speculative decoding; None selects the operator's default.
    tensor_parallel: GPUs per server.
    tokenizer, revision: those of the model if None.
    arguments: appended to both command lines.
    python: an interpreter that has SGLang installed.
    version: the version of that SGLang; None skips the check that it is supported.
    """

    model: str
    draft_model: str | None = None
    algorithm: Algorithm = "Standalone"
    steps: int | None = None
    top_k: int | None = None
    draft_tokens: int | None = None
    tensor_parallel: int = 1
    tokenizer: str | None = None
    revision: str | None = None
    arguments: Sequence[str] = ()
    python: str = "python3"
    version: str | None = None


@dataclass(frozen=True)
class Placement:
    """The GPUs of one server; none means the CPU. shared: both servers use the same GPUs."""

    gpus: Sequence[str]
    shared: bool = False

    def __str__(self) -> str:
        if not self.gpus:
            return "on the CPU (for smoke tests only)"
        return f"on GPU {', '.join(self.gpus)}{' (shared by both engines)' if self.shared else ''}"


@dataclass(frozen=True)
class EngineCommand:
    """The command line of an engine process, and variables to add to this process's environment."""

    command: Sequence[str]
    environment: Mapping[str, str]


def place(gpus: Sequence[str], tensor_parallel: int) -> dict[PoolName, Placement]:
    """Assign GPUs: separate ones for each server if there are enough, otherwise shared ones; without GPUs, the CPU.

    Raises EngineError if there are GPUs, but fewer than one server needs.
    """
    if not gpus:
        return {name: Placement(()) for name in POOLS}
    first, second = gpus[:tensor_parallel], gpus[tensor_parallel : 2 * tensor_parallel]
    if len(first) < tensor_parallel:
        raise EngineError(
            f"--tensor-parallel {tensor_parallel} requires {tensor_parallel} GPUs; visible: {len(gpus)}"
        )
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
    prefix_cache: MooncakeCache | None = None,
    plugin: Path | None = None,
) -> EngineCommand:
    """The command that starts a pool's server on 127.0.0.1.

    otlp_endpoint: OTLP/gRPC receiver of its spans. prefix_cache: the cache that it shares with the other server; it
    requires `plugin`, the folder in which the plugin is installed. Raises EngineError if the options are invalid.
    """
    for argument in options.arguments:
        _check_argument(argument, prefix_cache=prefix_cache is not None)
    version = SGLANG.version(None, options.version)
    SGLANG.check_version(version)
    speculation = Speculation(
        options.algorithm, options.draft_model, options.steps, options.top_k, options.draft_tokens
    )
    if prefix_cache is not None:
        _check_shareable(options, version, speculation)
    launch = Launch(
        model=options.model,
        served_name=served_name,
        host="127.0.0.1",
        port=port,
        tensor_parallel=options.tensor_parallel,
        tokenizer=options.tokenizer,
        revision=options.revision,
        speculation=speculation if pool == "speculative" else None,
        traces=Traces(otlp_endpoint) if otlp_endpoint else None,
        prefix_cache=prefix_cache,
    )
    # If an argument occurs twice, the last one applies, so the user's arguments come last.
    arguments = [*SGLANG.arguments(launch), *_placement_args(pool, placement), *options.arguments]
    environment = {**SGLANG.environment, "CUDA_VISIBLE_DEVICES": ",".join(placement.gpus)}
    if not placement.gpus:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    if otlp_endpoint is not None:
        environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "grpc"
    if prefix_cache is not None:
        inherited = os.environ.get("PYTHONPATH")
        environment["MOONCAKE_LOCAL_HOSTNAME"] = "127.0.0.1"
        environment["PYTHONPATH"] = f"{plugin}{os.pathsep}{inherited}" if inherited else str(plugin)
    return EngineCommand([options.python, "-m", SGLANG.module, *arguments], environment)


def mooncake_command(python: str, port: int, http_port: int) -> list[str]:
    """The command line of the master of a common prefix cache, which belongs to the Mooncake of an interpreter.

    http_port: serves its metrics and its health.
    """
    return [python, "-m", "mooncake.cli", f"--rpc_port={port}", f"--metrics_port={http_port}"]


def _check_shareable(options: SGLangOptions, version: str, speculation: Speculation) -> None:
    problem = SGLANG.unshareable(version, speculation, dict.fromkeys(POOLS, options.arguments))
    if problem is None:
        return
    messages = {
        "AlgorithmNotSupported": f"{options.algorithm} engines share no pages; use --algorithm Standalone or Ngram",
        "VersionNotSupported": f"the plugin does not support SGLang {version}; install SGLang "
        f"{' or '.join(sorted(VERSIONS))}",
    }
    raise EngineError(f"--prefix-cache common: {messages.get(problem.reason, problem.message)}")


def _check_argument(argument: str, *, prefix_cache: bool) -> None:
    name = argument.split("=", 1)[0]
    if reason := unsupported(argument):
        for field, option in OPTIONS_OF_FIELDS.items():
            reason = reason.replace(field, option)
        raise EngineError(f"-- {name} is not supported: {reason}")
    try:
        SGLANG.check_arguments([argument], None, prefix_cache=prefix_cache)
    except EngineError as error:
        raise EngineError(
            f"-- {name}: dps up sets this argument; use the corresponding option of dps up, if there is one"
        ) from error


def _placement_args(pool: PoolName, placement: Placement) -> list[str]:
    if not placement.gpus:
        return [*CPU, *(CPU_SPECULATION if pool == "speculative" else ())]
    return ["--mem-fraction-static", str(SHARED_MEMORY[pool])] if placement.shared else []
