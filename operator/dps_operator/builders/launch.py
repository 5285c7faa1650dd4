"""The engine process of one pool, as described by the spec."""

from dataclasses import replace

from dps_engines.launch import Adapter, EngineError, Launch, Speculation, Traces
from dps_engines.pools import POOLS, PoolName, other_pool
from dps_operator.api.pools import PoolSpec, SpeculativePoolSpec
from dps_operator.api.spec import Spec
from dps_operator.builders.node_pool import SHARES, gpu_bytes
from dps_operator.builders.pool_engines import engine_of, has_own_engine, pool_of, runtime_of, version_of
from dps_operator.builders.prefix_cache import launch_settings, shared
from dps_operator.builders.sources import model_path
from dps_operator.builders.speculation import launch_speculation
from dps_operator.errors import SpecError
from dps_operator.resources import MODELS, Router

API_KEY_VARIABLE = "DPS_ENGINE_API_KEY"
"""The variable with the API key of an engine that reads it only from its command line."""


def _speculation(pool: PoolSpec) -> Speculation | None:
    return launch_speculation(pool.speculation) if isinstance(pool, SpeculativePoolSpec) else None


def _gpu_bytes(spec: Spec, pool: PoolSpec) -> int | None:
    """Memory of one GPU; None if it is unknown, as with resources of the pool's own."""
    if any(name.startswith("nvidia.com/") for name in pool.resources.limits or {}):
        return None
    return gpu_bytes(spec.node_pool)


def knows_gpus(spec: Spec) -> bool:
    """Whether the memory of a pool's GPUs is known, so that the sizes of the models matter."""
    try:
        return any(_gpu_bytes(spec, pool_of(spec, name)) is not None for name in POOLS)
    except SpecError:
        return False


def memory_assumption(router: Router) -> str:
    """What is assumed because it cannot be computed whether the models fit into the GPUs; empty if it can.

    Raises SpecError if the GPUs do not exist.
    """
    spec, sizes = router.spec, router.sizes
    speculation = spec.pools.speculative.speculation
    names = [spec.model.name, *([speculation.draft_model] if speculation.draft_model else [])]
    unknown = [sizes.reason(name) for name in names if name not in sizes.known]
    reasons = [f"the size of {' and '.join(unknown)} is not known"] if unknown else []
    if any(_gpu_bytes(spec, pool_of(spec, name)) is None for name in POOLS):
        reasons.append("the memory of the GPUs is not known")
    if not reasons:
        return ""
    return (
        f"{' and '.join(reasons)}, so it is assumed that the models fit into the GPUs, and the engines' own defaults "
        "limit their memory unless args do"
    )


def _launch(router: Router, name: PoolName) -> Launch:
    spec = router.spec
    telemetry, pool = spec.telemetry, pool_of(spec, name)
    return Launch(
        model=spec.model.name,
        model_path=model_path(spec.model.source, "model", MODELS),
        served_name=spec.model.served_name or spec.model.name,
        tokenizer=spec.model.tokenizer,
        revision=spec.model.revision,
        port=runtime_of(spec, name).port,
        tensor_parallel=spec.engine.tensor_parallel,
        speculation=_speculation(pool),
        traces=Traces(telemetry.otlp_endpoint, telemetry.protocol) if telemetry.otlp_endpoint else None,
        prefix_cache=launch_settings(router),
        gpu_bytes=_gpu_bytes(spec, pool),
        models=router.sizes.known,
        adapters=tuple(Adapter(adapter.name, adapter.path) for adapter in spec.model.adapters),
    )


def _placed_launch(router: Router, name: PoolName) -> Launch:
    """The engine of a pool, with the one that shares its GPU."""
    launch = _launch(router, name)
    if router.spec.placement != "SharedGPU":
        return launch
    launch = replace(launch, shares_gpu_with=_launch(router, other_pool(name)))
    if router.spec.node_pool.sharing.strategy != "MPS" or launch.gpu_bytes is None:
        return launch
    return replace(launch, memory_limit=launch.gpu_bytes // SHARES)


def _checked(spec: Spec, name: PoolName, arguments: list[str], field: str) -> list[str]:
    try:
        runtime_of(spec, name).check_arguments(
            arguments, _speculation(pool_of(spec, name)), prefix_cache=shared(spec) is not None
        )
    except EngineError as error:
        raise SpecError(f"{field}: {error}") from error
    return arguments


def _api_key(spec: Spec, name: PoolName) -> list[str]:
    """The argument that sets the API key; empty if there is none, or if the engine reads it from a variable."""
    if spec.engine.api_key_secret_ref is None or runtime_of(spec, name).api_key_variable is not None:
        return []
    # The kubelet inserts the value, so that the pod template does not contain it.
    return ["--api-key", f"$({API_KEY_VARIABLE})"]


def host_cache_bytes(router: Router, name: PoolName, line: list[str]) -> int:
    """The host memory in which an engine with this command line keeps copies of KV, in bytes.

    Raises SpecError if an argument is not a number.
    """
    try:
        return runtime_of(router.spec, name).host_cache_bytes(_launch(router, name), line)
    except EngineError as error:
        raise SpecError(str(error)) from error


def engine_arguments(router: Router, name: PoolName) -> list[str]:
    """The command line of one pool's engines. The arguments of spec.engine come after the operator's, the pool's last.

    Raises SpecError if the version is not supported, if the spec has an argument that the operator sets or that is
    not supported, if the engine does not support other parts of the spec, or if the models do not fit into the GPUs.
    """
    spec = router.spec
    engine, runtime, version = engine_of(spec, name), runtime_of(spec, name), version_of(spec, name)
    pool = pool_of(spec, name)
    try:
        runtime.check_version(version)
    except EngineError as error:
        field = f"spec.pools.{name}" if has_own_engine(pool) else "spec.engine"
        raise SpecError(f"{field}: {error}") from error
    if spec.engine.args and runtime is not runtime_of(spec, other_pool(name)):
        raise SpecError(
            "spec.engine.args: the runtimes of the pools differ, and so do their arguments; use spec.pools.*.args"
        )
    additional = [
        *_checked(spec, name, spec.engine.args, "spec.engine.args"),
        *_checked(spec, name, pool.args, f"spec.pools.{name}.args"),
    ]
    launch = _placed_launch(router, name)
    try:
        runtime.check_launch(launch, engine.image, engine.version, additional)
        memory = runtime.memory_arguments(launch, version, additional)
        return [*runtime.arguments(launch), *_api_key(spec, name), *memory, *additional]
    except EngineError as error:
        raise SpecError(str(error)) from error
