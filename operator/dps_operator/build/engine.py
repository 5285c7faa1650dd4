"""A pool of engines: its Deployment and Service, and the volumes for models and compile caches."""

from typing import Any, Final

from dps_engines.models import MODELS as KNOWN_MODELS
from dps_engines.pools import PoolName, other_pool
from dps_operator.api import to_wire
from dps_operator.build.launch import API_KEY_VARIABLE, engine_arguments, engine_launch
from dps_operator.build.nodes import check_gpus, gpu_resource, placement
from dps_operator.build.pods import (
    CONTAINER_SECURITY,
    ENGINE_RESOURCES,
    Target,
    claim_spec,
    container_ports,
    container_resources,
    overlay,
    plain_env,
    pod_template,
    secret_env,
    service,
    service_account,
    source_additions,
    spread,
    volume,
)
from dps_operator.build.prefix_cache import pod_additions, template_inputs
from dps_operator.effective import STARTUP_PROBE_PERIOD, EffectivePool, Router
from dps_operator.errors import SpecError
from dps_operator.objects import (
    ENGINE,
    MODELS,
    NEIGHBOUR_CONTAINER,
    SPEC_HASH,
    TEMPLATE_HASH,
    Manifest,
    child_manifest,
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
"""The largest progress deadline, with which Kubernetes applies none."""
ENGINE_CACHE = "/engine-cache"
GIB: Final = 2**30
COPIES: Final = 2
"""Limit in multiples of the 16-bit weights: some repositories have the weights in two formats, or in 32 bits."""
OTHER_FILES_GIB: Final = 32
"""Room for tokenizers, partial downloads, and the cache of the Hub's client."""
SOURCES = Target("engine", "models", MODELS, ENGINE_RESOURCES)
"""Models are downloaded to the volume that also has those from the Hub."""
WAITING: Final[PoolName] = "speculative"
"""The pool whose engine starts second on a GPU that two engines share.

Two engines that start at the same time would each count the other's memory as free. The init container of the second
one therefore waits for the first one, even if both pods start again after a reboot of the node."""
FIRST: Final[PoolName] = "greedy"
SCRIPT: Final = """\
import http.client, sys, time, urllib.request

url, end = sys.argv[1], time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    try:
        urllib.request.urlopen(url, timeout=5).close()
        break
    except (OSError, http.client.HTTPException):
        time.sleep(2)
"""
"""Waits until the URL in the first argument answers with success, at most for the seconds in the second one."""
WAITING_RESOURCES: Final[Manifest] = {
    "requests": {"cpu": "10m", "memory": "32Mi"},
    "limits": {"memory": "128Mi"},
}


def engine_deployment(router: Router, name: PoolName, settings: Settings) -> Manifest:
    """The pool's Deployment. If another controller scales the pool, it has no `replicas`.

    Raises SpecError if the spec is invalid.
    """
    spec, pool = router.spec, router.pools[name]
    shared = spec.placement == "SharedGPU"
    pod: Manifest = {
        "containers": [_container(router, pool)],
        "terminationGracePeriodSeconds": 300,
        "topologySpreadConstraints": spread(router, name),
        **placement(spec.node_pool, selector(router, other_pool(name)) if shared else None),
        **service_account(router, pool),
    }
    for additions in (
        volume("engine", "models", MODELS, **_models_volume(router, pool)),
        _shared_memory(router),
        source_additions(spec.model.source, "model", SOURCES, settings.loader_image),
        source_additions(pool.draft_source, "draft", SOURCES, settings.loader_image),
        _engine_cache(router),
        pod_additions(router, pool, settings),
        _start_order(router, pool),
    ):
        pod = overlay(pod, additions)
    template = pod_template(router, name, settings, pod, pool.spec.pod_template)
    check_gpus(template, name, spec.engine.tensor_parallel)
    deployment: Manifest = {
        "selector": {"matchLabels": selector(router, name)},
        "strategy": _strategy(pool, shared=shared),
        # A rollout has failed if an engine takes ten minutes longer than it takes at most.
        "progressDeadlineSeconds": min(_waiting_seconds(router, name) + pool.load_seconds + 600, NO_DEADLINE),
        "revisionHistoryLimit": 3,
        "template": template,
    }
    if pool.replicas is not None:
        deployment["replicas"] = pool.replicas
    annotations = {
        TEMPLATE_HASH: digest(template),
        SPEC_HASH: _spec_hash(router, pool),
        ENGINE: f"{pool.engine.runtime} {pool.version}",
    }
    return child_manifest(router, "Deployment", name, annotations, spec=deployment)


def engine_service(router: Router, name: PoolName) -> Manifest:
    """The Service whose EndpointSlices list the pool's replicas for the gateway."""
    return service(router, name, {"http": router.pools[name].runtime.port})


def engine_claims(router: Router) -> list[Manifest]:
    """The PersistentVolumeClaims that all engine pods share: for models, and for what engines compile."""
    models, compiled = router.spec.model.cache, router.spec.engine.cache
    claims = []
    if models is not None and models.size is not None and models.access_mode == "ReadWriteMany":
        spec = claim_spec(models.size, models.storage_class_name)
        claims.append(child_manifest(router, "PersistentVolumeClaim", "models", spec=spec))
    if compiled is not None and compiled.claim is not None:
        spec = claim_spec(compiled.claim.size, compiled.claim.storage_class_name)
        claims.append(child_manifest(router, "PersistentVolumeClaim", "engine-cache", spec=spec))
    return claims


def _models_volume(router: Router, pool: EffectivePool) -> Manifest:
    cache = router.spec.model.cache
    if cache is None:
        limit = (pool.spec.resources.limits or {}).get("ephemeral-storage") or _download_limit(router, pool)
        return {"emptyDir": {"sizeLimit": limit} if limit else {}}
    if cache.size is None or cache.access_mode == "ReadWriteMany":
        claim = cache.existing_claim or child_name(router, "models")
        return {"persistentVolumeClaim": {"claimName": claim}}
    spec = claim_spec(cache.size, cache.storage_class_name, cache.access_mode)
    return {"ephemeral": {"volumeClaimTemplate": {"spec": spec}}}


def _download_limit(router: Router, pool: EffectivePool) -> str | None:
    """The limit of a pod's directory for the models that a pool downloads, so that they cannot fill the node's disk.

    None if the size of a model is not known, because a pod that exceeds its limit is evicted. Sizes of adapters are
    never known.
    """
    draft = pool.speculation.draft_model if pool.speculation else None
    names = [router.spec.model.name, *([draft] if draft is not None else [])]
    if router.spec.model.adapters or any(model not in KNOWN_MODELS for model in names):
        return None
    weights = sum(KNOWN_MODELS[model].weights(1) for model in names)
    return f"{-(-COPIES * weights // GIB) + OTHER_FILES_GIB}Gi"


def _engine_cache(router: Router) -> Manifest:
    """What to merge into the pod spec for the volume with what engines compile; empty if there is none."""
    cache = router.spec.engine.cache
    if cache is None:
        return {}
    if cache.empty_dir is not None:
        limit = cache.empty_dir.size_limit
        source: Manifest = {"emptyDir": {"sizeLimit": limit} if limit else {}}
    elif cache.host_path is not None:
        source = {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    else:
        claim = cache.existing_claim or child_name(router, "engine-cache")
        source = {"persistentVolumeClaim": {"claimName": claim}}
    return volume("engine", "engine-cache", ENGINE_CACHE, **source)


def waits(router: Router, name: PoolName) -> bool:
    """Whether the engines of a pool wait for those of the other one before they start."""
    return router.spec.placement == "SharedGPU" and name == WAITING


def _waiting_seconds(router: Router, name: PoolName) -> int:
    """Seconds for which the engines of a pool wait at most for those of the other one; 0 if they do not wait.

    They wait no longer than the other engine may take to load, because it may be unable to start.
    """
    return router.pools[FIRST].load_seconds if waits(router, name) else 0


def _start_order(router: Router, pool: EffectivePool) -> Manifest:
    """What to merge into the pod spec of a pool's engines; empty if they do not wait.

    The Service has only engines that are ready. NVIDIA's container runtime gives the container no GPU.
    """
    if not waits(router, pool.name):
        return {}
    first = router.pools[FIRST].runtime
    url = f"http://{child_name(router, FIRST)}.{router.namespace}.svc:{first.port}{first.health_path}"
    container: Manifest = {
        "name": NEIGHBOUR_CONTAINER,
        "image": pool.image,
        "command": ["python3", "-c", SCRIPT, url, str(_waiting_seconds(router, pool.name))],
        "env": plain_env({"NVIDIA_VISIBLE_DEVICES": "void"}),
        "resources": WAITING_RESOURCES,
    }
    return {"initContainers": [container]}


def _env(router: Router, pool: EffectivePool) -> list[Manifest]:
    """The container's environment. Variables of spec.engine override the operator's; the pool's override both."""
    spec, runtime = router.spec, pool.runtime
    token, key = spec.model.token_secret_ref, spec.engine.api_key_secret_ref
    plain = {"HF_HOME": MODELS, **runtime.environment}
    if spec.engine.cache is not None:
        plain |= {name: f"{ENGINE_CACHE}/{folder}" for name, folder in runtime.cache_variables.items()}
    variables: list[Manifest] = plain_env(plain)
    if token is not None:
        variables.append(secret_env("HF_TOKEN", token))
    if key is not None:
        variables.append(secret_env(runtime.api_key_variable or API_KEY_VARIABLE, key))
    if spec.telemetry.otlp_endpoint is not None:
        name, protocol = child_name(router, pool.name), spec.telemetry.protocol
        variables += plain_env({"OTEL_SERVICE_NAME": name, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol})
    variables += [to_wire(variable) for variable in pool.all_env]
    return list({variable["name"]: variable for variable in variables}.values())


def _container(router: Router, pool: EffectivePool) -> Manifest:
    spec, runtime = router.spec, pool.runtime

    def probe(**timing: int) -> Manifest:
        return {"httpGet": {"path": runtime.health_path, "port": "http"}, **timing}

    gpus, arguments = spec.engine.tensor_parallel, engine_arguments(router, pool.name)
    memory = f"{MEMORY_GIB_PER_GPU * gpus}Gi"
    if cached := runtime.host_cache_bytes(engine_launch(router, pool), arguments):
        memory = f"{MEMORY_GIB_PER_GPU * gpus * 1024 + cached // 2**20}Mi"
    defaults = {
        "requests": {"cpu": str(CPUS_PER_GPU * gpus), "memory": memory},
        "limits": {gpu_resource(spec.node_pool, shared=spec.placement == "SharedGPU"): str(gpus)},
    }
    return {
        "name": "engine",
        "image": pool.image,
        "command": ["python3", "-m", runtime.module],
        "args": arguments,
        "env": _env(router, pool),
        "ports": container_ports(http=runtime.port),
        "resources": container_resources(defaults, pool.spec.resources),
        "startupProbe": probe(
            periodSeconds=STARTUP_PROBE_PERIOD,
            timeoutSeconds=5,
            failureThreshold=runtime.load_seconds // STARTUP_PROBE_PERIOD,
        ),
        "readinessProbe": probe(periodSeconds=5, timeoutSeconds=5, failureThreshold=3),
        # A busy engine may respond slowly, so it is restarted only after several minutes without a response.
        "livenessProbe": probe(periodSeconds=30, timeoutSeconds=20, failureThreshold=10),
        "securityContext": CONTAINER_SECURITY,
        "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_SECONDS}}},
    }


def _shared_memory(router: Router) -> Manifest:
    """The pod's /dev/shm. With MPS, the device plugin mounts there what the engines share with the MPS daemon."""
    if router.spec.placement == "SharedGPU" and router.spec.node_pool.sharing.strategy == "MPS":
        return {}
    return volume("engine", "shm", "/dev/shm", emptyDir={"medium": "Memory", "sizeLimit": SHARED_MEMORY})


def _strategy(pool: EffectivePool, *, shared: bool) -> Manifest:
    """The Deployment's strategy. By default, a rollout never reduces the number of ready replicas.

    shared: whether two engines share a GPU. A third one does not fit on it; raises SpecError if it would have to.
    """
    strategy = pool.spec.strategy
    if strategy.type == "Recreate":
        return {"type": "Recreate"}
    if shared and str(strategy.max_surge).rstrip("%") != "0":
        raise SpecError(
            "placement SharedGPU has no GPU for an additional engine during a rollout; set "
            f"pools.{pool.name}.strategy.type to Recreate, or maxSurge to 0 and maxUnavailable to 1"
        )
    surge = 1 if strategy.max_surge is None else strategy.max_surge
    unavailable = 0 if strategy.max_unavailable is None else strategy.max_unavailable
    return {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": unavailable, "maxSurge": surge}}


def _spec_hash(router: Router, pool: EffectivePool) -> str:
    """Digest of the fields of the spec that a pool's pod template depends on.

    Defaults are left out, so that a field which a later release adds does not change the digest. The other pool matters
    only if both share a GPU, and because it may prevent the pools from sharing a prefix cache.
    """
    parts = {
        "model": router.spec.model,
        "engine": pool.engine.model_copy(update={"upgrade_policy": "Manual"}),
        "nodePool": router.spec.node_pool,
        "telemetry": router.spec.telemetry.model_copy(
            update={"service_monitor": None, "access_log": False, "trace_url": None}
        ),
    }
    fields: dict[str, Any] = {
        part: value.model_dump(mode="json", exclude_defaults=True) for part, value in parts.items()
    }
    fields["pool"] = pool.template_fields
    if router.spec.placement == "SharedGPU":
        fields["neighbour"] = router.pools[other_pool(pool.name)].template_fields
    return digest([fields, template_inputs(router, pool)])
