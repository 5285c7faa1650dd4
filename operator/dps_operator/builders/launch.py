"""The engine process of one pool, as described by the spec."""

from dataclasses import replace

from dps_engines.launch import EngineError, Launch, Speculation, Traces
from dps_engines.pools import PoolName, other_pool
from dps_engines.registry import RUNTIMES
from dps_engines.runtime import EngineRuntime
from dps_operator.api.pools import PoolSpec, SpeculativePoolSpec
from dps_operator.api.spec import Spec
from dps_operator.builders.node_pool import GPU_BYTES
from dps_operator.builders.prefix_cache import launch_settings
from dps_operator.errors import SpecError


def runtime_of(spec: Spec) -> EngineRuntime:
    """The runtime that `spec.engine.runtime` selects."""
    return RUNTIMES[spec.engine.runtime]


def pool_of(spec: Spec, name: PoolName) -> PoolSpec:
    """The spec of one pool."""
    return spec.pools.speculative if name == "speculative" else spec.pools.greedy


def _speculation(pool: PoolSpec) -> Speculation | None:
    return Speculation(**pool.speculation.model_dump()) if isinstance(pool, SpeculativePoolSpec) else None


SHARED_GPU = "nvidia.com/gpu.shared"
"""The resource of time-sliced GPUs if the device plugin renames it."""


def _gpu_bytes(spec: Spec, pool: PoolSpec) -> int | None:
    """Memory of one GPU; None if it is unknown, as with other resources than whole GPUs."""
    resources = {name for name in pool.resources.limits or {} if name.startswith("nvidia.com/")}
    if resources and not (spec.placement == "SharedGPU" and SHARED_GPU in resources):
        return None
    return GPU_BYTES.get(spec.node_pool.profile)


def _launch(spec: Spec, pool: PoolSpec) -> Launch:
    telemetry = spec.telemetry
    return Launch(
        model=spec.model.name,
        served_name=spec.model.served_name or spec.model.name,
        tokenizer=spec.model.tokenizer,
        revision=spec.model.revision,
        port=runtime_of(spec).port,
        tensor_parallel=spec.engine.tensor_parallel,
        speculation=_speculation(pool),
        traces=Traces(telemetry.otlp_endpoint, telemetry.protocol) if telemetry.otlp_endpoint else None,
        prefix_cache=launch_settings(spec),
        gpu_bytes=_gpu_bytes(spec, pool),
    )


def _placed_launch(spec: Spec, name: PoolName) -> Launch:
    """The engine of a pool, with the one that shares its GPU."""
    launch = _launch(spec, pool_of(spec, name))
    if spec.placement != "SharedGPU":
        return launch
    return replace(launch, shares_gpu_with=_launch(spec, pool_of(spec, other_pool(name))))


def _checked(spec: Spec, pool: PoolSpec, arguments: list[str], field: str) -> list[str]:
    try:
        runtime_of(spec).check_arguments(
            arguments, _speculation(pool), prefix_cache=launch_settings(spec) is not None
        )
    except EngineError as error:
        raise SpecError(f"{field}: {error}") from error
    return arguments


def engine_arguments(spec: Spec, name: PoolName) -> list[str]:
    """The command line of one pool's engines. The arguments of spec.engine come after the operator's, the pool's last.

    Raises SpecError if the version is not supported, if the spec has an argument that the operator sets or that is
    not supported, or if the models do not fit into the GPUs.
    """
    runtime, pool = runtime_of(spec), pool_of(spec, name)
    version = runtime.version(spec.engine.image, spec.engine.version)
    try:
        runtime.check_version(version)
    except EngineError as error:
        raise SpecError(f"spec.engine: {error}") from error
    additional = [
        *_checked(spec, pool, spec.engine.args, "spec.engine.args"),
        *_checked(spec, pool, pool.args, f"spec.pools.{name}.args"),
    ]
    launch = _placed_launch(spec, name)
    try:
        memory = runtime.memory_arguments(launch, version, additional)
        return [*runtime.arguments(launch), *memory, *additional]
    except EngineError as error:
        raise SpecError(str(error)) from error
