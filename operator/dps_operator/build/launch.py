"""The engine process of one pool, as described by the effective spec."""

from dataclasses import fields, replace
from typing import Final

from dps_engines.launch import Adapter, Launch, Traces
from dps_engines.pools import PoolName, other_pool
from dps_operator.api import Engine
from dps_operator.build.nodes import SHARES, gpu_bytes
from dps_operator.build.prefix_cache import launch_settings
from dps_operator.effective import EffectivePool, Router, launch_speculation, model_path
from dps_operator.errors import SpecError
from dps_operator.objects import MODELS

API_KEY_VARIABLE: Final = "DPS_ENGINE_API_KEY"
"""The variable with the API key of an engine that reads it only from its command line."""
COPIED: Final = {field.name for field in fields(Launch)} & Engine.model_fields.keys()
"""The fields of `spec.engine` that a Launch has as well, and that are copied to it."""


def memory_warning(router: Router) -> str:
    """Why the models probably do not fit into the GPUs; empty if they do, or if this is not known.

    Raises SpecError if the GPUs do not exist.
    """
    pools = router.pools.values()
    warnings = (pool.runtime.memory_warning(engine_launch(router, pool), pool.all_args) for pool in pools)
    return next(filter(None, warnings), "")


def engine_launch(router: Router, pool: EffectivePool) -> Launch:
    """The engine of a pool, without the one that may share its GPU. Raises SpecError if its GPUs do not exist."""
    spec, telemetry = router.spec, router.spec.telemetry
    # The memory of a GPU is unknown with resources of the pool's own.
    own_gpus = any(name.startswith("nvidia.com/") for name in pool.spec.resources.limits or {})
    return Launch(
        model=spec.model.name,
        model_path=model_path(spec.model.source, "model", MODELS),
        served_name=spec.model.served_name or spec.model.name,
        tokenizer=spec.model.tokenizer,
        revision=spec.model.revision,
        port=pool.runtime.port,
        speculation=launch_speculation(pool.speculation) if pool.speculation else None,
        traces=Traces(telemetry.otlp_endpoint, telemetry.protocol) if telemetry.otlp_endpoint else None,
        prefix_cache=launch_settings(router),
        gpu_bytes=None if own_gpus else gpu_bytes(spec.node_pool),
        adapters=tuple(Adapter(adapter.name, adapter.path) for adapter in spec.model.adapters),
        **spec.engine.model_dump(include=COPIED),
    )


def _check_arguments(router: Router, pool: EffectivePool) -> None:
    """Raises SpecError if the spec has an argument that the operator sets or that is not supported."""
    neighbour = router.pools[other_pool(pool.name)]
    if router.spec.engine.args and pool.runtime is not neighbour.runtime:
        raise SpecError(
            "spec.engine.args: the runtimes of the pools differ, and so do their arguments; use spec.pools.*.args"
        )
    shares, common = router.shared_cache is not None, router.spec.engine.args
    for field, arguments in (("spec.engine", common), (f"spec.pools.{pool.name}", pool.spec.args)):
        try:
            speculation = launch_speculation(pool.speculation) if pool.speculation else None
            pool.runtime.check_arguments(arguments, speculation, prefix_cache=shares)
        except SpecError as error:
            raise SpecError(f"{field}.args: {error}") from error


def engine_arguments(router: Router, name: PoolName) -> list[str]:
    """The command line of one pool's engines. The arguments of spec.engine come after the operator's, the pool's last.

    Raises SpecError if the version is not supported, if the spec has an argument that the operator sets or that is
    not supported, or if the engine does not support other parts of the spec.
    """
    spec, pool = router.spec, router.pools[name]
    engine, runtime = pool.engine, pool.runtime
    try:
        runtime.check_version(pool.version)
    except SpecError as error:
        field = f"spec.pools.{name}" if pool.own_engine else "spec.engine"
        raise SpecError(f"{field}: {error}") from error
    _check_arguments(router, pool)
    # The kubelet inserts the value of the variable, so that the pod template does not contain the key.
    by_argument = spec.engine.api_key_secret_ref is not None and runtime.api_key_variable is None
    api_key = ["--api-key", f"$({API_KEY_VARIABLE})"] if by_argument else []
    launch = engine_launch(router, pool)
    if spec.placement == "SharedGPU":
        launch = replace(launch, shares_gpu_with=engine_launch(router, router.pools[other_pool(name)]))
        if spec.node_pool.sharing.strategy == "MPS" and launch.gpu_bytes is not None:
            launch = replace(launch, memory_limit=launch.gpu_bytes // SHARES)
    runtime.check_launch(launch, engine.image, engine.version, pool.all_args)
    memory = runtime.memory_arguments(launch, pool.all_args)
    return [*runtime.arguments(launch), *api_key, *memory, *pool.all_args]
