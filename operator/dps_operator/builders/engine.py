"""A pool of engines: its Deployment and Service, and the volume for models."""

from typing import Any

from dps_engines.pools import PoolName, other_pool
from dps_operator.api.pools import PoolStrategy
from dps_operator.api.spec import Spec
from dps_operator.api.types import EnvVar, plain_env, to_wire
from dps_operator.builders.launch import API_KEY_VARIABLE, engine_arguments, host_cache_bytes
from dps_operator.builders.node_pool import check_gpus, gpu_resource, placement
from dps_operator.builders.pods import (
    CONTAINER_SECURITY,
    container_resources,
    overlay,
    pod_template,
    pull_secrets,
    spread,
)
from dps_operator.builders.pool_engines import (
    STARTUP_PROBE_PERIOD,
    engine_of,
    load_seconds,
    pool_of,
    runtime_of,
    version_of,
)
from dps_operator.builders.prefix_cache import (
    SECRET_REVISION,
    pod_additions,
    separates_tenants,
    shared,
)
from dps_operator.builders.scaling import has_autoscaler
from dps_operator.builders.shared_gpu import start_order, waiting_seconds
from dps_operator.builders.sources import (
    ENGINE_RESOURCES,
    ENGINE_SECURITY,
    Target,
    draft_source,
    service_account,
    source_additions,
)
from dps_operator.builders.volumes import download_limit, engine_cache, engine_cache_env
from dps_operator.errors import SpecError
from dps_operator.resources import (
    ENGINE,
    MODELS,
    SPEC_HASH,
    TEMPLATE_HASH,
    Manifest,
    Router,
    child,
    child_name,
    digest,
    selector,
)
from dps_operator.settings import Settings

DRAIN_SECONDS = 15
"""Seconds between the start of a pod's termination and SIGTERM, during which the gateways remove its endpoint."""
CPUS_PER_GPU, MEMORY_GIB_PER_GPU = 4, 32
"""Default resource requests per GPU. Each tensor-parallel rank is a separate process, and host memory grows with
the model."""
SHARED_MEMORY = "16Gi"
NO_DEADLINE = 2**31 - 1
SOURCES = Target("engine", "models", MODELS, ENGINE_RESOURCES, ENGINE_SECURITY)
"""Models are downloaded to the volume that also has those from the Hub."""
NOT_IN_THE_TEMPLATE = {
    "replicas": None,
    "scaling": "Managed",
    "autoscaling": None,
    "strategy": PoolStrategy(),
    "runtime": None,
    "image": None,
    "version": None,
}
"""Fields of a pool on which its pod template does not depend, or which `engine_of` includes, with their defaults."""


def _env(spec: Spec, name: PoolName, service_name: str) -> list[Manifest]:
    """The container's environment. Variables of spec.engine override the operator's; the pool's override both."""
    runtime = runtime_of(spec, name)
    defaults: list[Manifest] = plain_env({"HF_HOME": MODELS, **runtime.environment})
    defaults += engine_cache_env(spec, runtime.cache_variables)
    if spec.model.token_secret_ref is not None:
        reference = to_wire(spec.model.token_secret_ref)
        defaults.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    if spec.engine.api_key_secret_ref is not None:
        reference = to_wire(spec.engine.api_key_secret_ref)
        variable = runtime.api_key_variable or API_KEY_VARIABLE
        defaults.append({"name": variable, "valueFrom": {"secretKeyRef": reference}})
    if spec.telemetry.otlp_endpoint is not None:
        defaults += plain_env(
            {
                "OTEL_SERVICE_NAME": service_name,
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": spec.telemetry.protocol,
            }
        )
    overrides: list[EnvVar] = [*spec.engine.env, *pool_of(spec, name).env]
    by_name: dict[Any, Manifest] = {variable["name"]: variable for variable in defaults}
    by_name |= {variable.name: to_wire(variable) for variable in overrides}
    return list(by_name.values())


def _models_volume(router: Router, name: PoolName) -> Manifest:
    cache = router.spec.model.cache
    if cache is None:
        storage = pool_of(router.spec, name).resources.limits or {}
        limit = storage.get("ephemeral-storage") or download_limit(router, name)
        return {"emptyDir": {"sizeLimit": limit} if limit else {}}
    if cache.existing_claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.existing_claim}}
    if cache.access_mode == "ReadWriteMany":
        return {"persistentVolumeClaim": {"claimName": child_name(router, "models")}}
    return {"ephemeral": {"volumeClaimTemplate": {"spec": claim_spec(router)}}}


def claim_spec(router: Router) -> Manifest:
    """Spec of the PersistentVolumeClaim for the model cache; empty if the operator does not create it."""
    cache = router.spec.model.cache
    if cache is None or cache.size is None:
        return {}
    claim: Manifest = {
        "accessModes": [cache.access_mode],
        "resources": {"requests": {"storage": cache.size}},
    }
    if cache.storage_class_name is not None:
        claim["storageClassName"] = cache.storage_class_name
    return claim


def models_claim(router: Router) -> list[Manifest]:
    """The PersistentVolumeClaim of a model cache that all engine pods share; empty if there is none to create."""
    cache = router.spec.model.cache
    if cache is None or cache.size is None or cache.access_mode != "ReadWriteMany":
        return []
    return [child(router, "v1", "PersistentVolumeClaim", "models", spec=claim_spec(router))]


def _memory_request(gpus: int, cache_bytes: int) -> str:
    """The default memory request. cache_bytes: host memory for copies of KV."""
    if not cache_bytes:
        return f"{MEMORY_GIB_PER_GPU * gpus}Gi"
    return f"{MEMORY_GIB_PER_GPU * gpus * 1024 + cache_bytes // 2**20}Mi"


def _container(router: Router, name: PoolName) -> Manifest:
    spec, runtime = router.spec, runtime_of(router.spec, name)
    pool, engine = pool_of(spec, name), engine_of(spec, name)

    def probe(**timing: int) -> Manifest:
        return {"httpGet": {"path": runtime.health_path, "port": "http"}, **timing}

    gpus, arguments = engine.tensor_parallel, engine_arguments(router, name)
    memory = _memory_request(gpus, host_cache_bytes(router, name, arguments))
    defaults = {
        "requests": {"cpu": str(CPUS_PER_GPU * gpus), "memory": memory},
        "limits": {gpu_resource(spec.node_pool, shared=spec.placement == "SharedGPU"): str(gpus)},
    }
    return {
        "name": "engine",
        "image": runtime.image(engine.image, engine.version),
        "command": ["python3", "-m", runtime.module],
        "args": arguments,
        "env": _env(spec, name, child_name(router, name)),
        "ports": [{"name": "http", "containerPort": runtime.port, "protocol": "TCP"}],
        "resources": container_resources(defaults, pool.resources),
        "startupProbe": probe(
            periodSeconds=STARTUP_PROBE_PERIOD,
            timeoutSeconds=5,
            failureThreshold=runtime.load_seconds // STARTUP_PROBE_PERIOD,
        ),
        "readinessProbe": probe(periodSeconds=5, timeoutSeconds=5, failureThreshold=3),
        # A busy engine may respond slowly, so it is restarted only after several minutes without a response.
        "livenessProbe": probe(periodSeconds=30, timeoutSeconds=20, failureThreshold=10),
        "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_SECONDS}}},
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "models", "mountPath": MODELS}],
    }


def _shared_memory(spec: Spec) -> Manifest:
    """The pod's /dev/shm. With MPS, the device plugin mounts there what the engines share with the MPS daemon."""
    if spec.placement == "SharedGPU" and spec.node_pool.sharing.strategy == "MPS":
        return {}
    mount = {"name": "shm", "mountPath": "/dev/shm"}
    return {
        "containers": [{"name": "engine", "volumeMounts": [mount]}],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}],
    }


def _strategy(spec: Spec, name: PoolName) -> Manifest:
    """The Deployment's strategy. By default, a rollout never reduces the number of ready replicas.

    A third engine does not fit on a GPU that two share, so there the default replaces the pod. Raises SpecError if such
    a GPU would need room for one.
    """
    settings = pool_of(spec, name).strategy
    if spec.placement == "SharedGPU":
        if settings == PoolStrategy():
            settings = PoolStrategy(max_surge=0, max_unavailable=1)
        elif settings.type != "Recreate" and str(settings.max_surge).rstrip("%") != "0":
            raise SpecError(
                "placement SharedGPU has no GPU for an additional engine during a rollout; set "
                f"pools.{name}.strategy.type to Recreate, or maxSurge to 0 and maxUnavailable to 1"
            )
    if settings.type == "Recreate":
        return {"type": "Recreate"}
    surge = 1 if settings.max_surge is None else settings.max_surge
    unavailable = 0 if settings.max_unavailable is None else settings.max_unavailable
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": unavailable, "maxSurge": surge},
    }


def _progress_deadline(router: Router, name: PoolName) -> int:
    """Seconds without progress after which a rollout has failed: ten minutes more than an engine takes at most.

    Kubernetes applies no deadline if it is NO_DEADLINE, its largest value.
    """
    seconds = waiting_seconds(router, name) + load_seconds(router.spec, name) + 600
    return min(seconds, NO_DEADLINE)


def _spec_hash(spec: Spec, name: PoolName, cache_revision: str) -> str:
    """Digest of the fields of the spec that a pool's pod template depends on.

    Defaults are left out, so that a field which a later release adds does not change the digest. The other pool matters
    only if both share a GPU, and because it may prevent the pools from sharing a prefix cache.
    """
    parts: dict[str, Any] = {
        "model": spec.model,
        "engine": engine_of(spec, name).model_copy(update={"upgrade_policy": "Manual"}),
        "nodePool": spec.node_pool,
        "telemetry": spec.telemetry.model_copy(update={"service_monitor": None, "access_log": False}),
        "pool": pool_of(spec, name).model_copy(update=NOT_IN_THE_TEMPLATE),
    }
    if spec.placement == "SharedGPU":
        parts["neighbour"] = pool_of(spec, other_pool(name)).model_copy(update=NOT_IN_THE_TEMPLATE)
    fields = {part: value.model_dump(mode="json", exclude_defaults=True) for part, value in parts.items()}
    cache = shared(spec)
    if cache is None:
        return digest([fields, ["plugin"] if separates_tenants(spec, name) else []])
    master = {"mooncake": {"master"}}
    settings = cache.model_dump(mode="json", exclude_defaults=True, exclude=master)
    return digest([fields, [settings, cache_revision]])


def _neighbour(router: Router, name: PoolName) -> dict[str, str] | None:
    """The labels of the pod with which a pool's engine shares a GPU."""
    if router.spec.placement != "SharedGPU":
        return None
    return selector(router, other_pool(name))


def engine_deployment(
    router: Router, name: PoolName, settings: Settings, cache_revision: str = ""
) -> Manifest:
    """The pool's Deployment. If another controller scales the pool, it has no `replicas`.

    cache_revision: identifies the Secret of the common prefix cache; a change restarts the engines that use it. Raises
    SpecError if the spec is invalid.
    """
    pool = pool_of(router.spec, name)
    pod: Manifest = {
        "containers": [_container(router, name)],
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": 300,
        "topologySpreadConstraints": spread(router, name),
        "volumes": [{"name": "models", **_models_volume(router, name)}],
        **placement(router.spec.node_pool, _neighbour(router, name)),
        **pull_secrets(settings),
        **service_account(router.spec, name),
    }
    plugin = pod_additions(router, name, settings)
    revision = {SECRET_REVISION: cache_revision} if cache_revision and shared(router.spec) else None
    for additions in (
        _shared_memory(router.spec),
        source_additions(router.spec.model.source, "model", SOURCES, settings.loader_image),
        source_additions(draft_source(router.spec, name), "draft", SOURCES, settings.loader_image),
        engine_cache(router),
        plugin,
        start_order(router, name),
    ):
        pod = overlay(pod, additions)
    template = pod_template(router, name, pod, pool.pod_template, revision)
    check_gpus(template, name, router.spec.engine.tensor_parallel)
    spec: Manifest = {
        "selector": {"matchLabels": selector(router, name)},
        "strategy": _strategy(router.spec, name),
        "progressDeadlineSeconds": _progress_deadline(router, name),
        "revisionHistoryLimit": 3,
        "template": template,
    }
    if router.spec.suspend:
        # A HorizontalPodAutoscaler is inactive while its target has no replicas.
        spec["replicas"] = 0
    elif pool.scaling == "Managed" and not has_autoscaler(pool):
        spec["replicas"] = pool.replicas or 1
    annotations = {
        TEMPLATE_HASH: digest(template),
        SPEC_HASH: _spec_hash(router.spec, name, cache_revision),
        ENGINE: f"{engine_of(router.spec, name).runtime} {version_of(router.spec, name)}",
    }
    return child(router, "apps/v1", "Deployment", name, annotations, spec=spec)


def engine_service(router: Router, name: PoolName) -> Manifest:
    """The Service whose EndpointSlices list the pool's replicas for the gateway."""
    port = {
        "name": "http",
        "port": runtime_of(router.spec, name).port,
        "targetPort": "http",
        "protocol": "TCP",
    }
    return child(
        router,
        "v1",
        "Service",
        name,
        spec={"type": "ClusterIP", "selector": selector(router, name), "ports": [port]},
    )
