"""The prefix caches of the engines: the plugin in their pods, and the Secret and volume of a common prefix cache."""

from dps_engines import launch
from dps_engines.launch import Unshareable
from dps_engines.pools import POOLS, PoolName
from dps_operator.api.prefix_cache import FileBackend, MooncakeBackend, PrefixCache
from dps_operator.api.spec import Spec
from dps_operator.api.types import quantity_bytes
from dps_operator.builders.credentials import CREDENTIALS, entry
from dps_operator.builders.pods import CONTAINER_SECURITY, overlay
from dps_operator.builders.pool_engines import runtime_of, version_of
from dps_operator.builders.speculation import launch_speculation
from dps_operator.builders.volumes import shared_claim, shared_volume
from dps_operator.errors import SpecError
from dps_operator.resources import Manifest, Router, child_name
from dps_operator.settings import Settings

CACHE_DIR = "/prefix-cache"
PLUGIN_DIR = "/opt/dps-plugin"
SECRET_DIR = "/etc/dps-prefix-cache"
SECRET_KEY = "secret"
SECRET_REVISION = "dpsrouter.io/prefix-cache-secret"
PLUGIN_PATH = "PYTHONPATH"
MASTER_PORT = 50051
USER = 65532
"""UID of the operator's image."""
RESOURCES: Manifest = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
_PLUGIN_MOUNT: Manifest = {"name": "prefix-cache-plugin", "mountPath": PLUGIN_DIR}


def common(spec: Spec) -> PrefixCache | None:
    """Settings of the common prefix cache; None if each engine has its own."""
    cache = spec.prefix_cache
    return cache if cache is not None and cache.mode == "Common" else None


def _pool_arguments(spec: Spec) -> dict[PoolName, list[str]]:
    return {
        "speculative": [*spec.engine.args, *spec.pools.speculative.args],
        "greedy": [*spec.engine.args, *spec.pools.greedy.args],
    }


def unshareable(spec: Spec) -> Unshareable | None:
    """Why the pools cannot share a common prefix cache; None if they can."""
    if spec.model.adapters:
        return Unshareable(
            "LoRAEnabled", "engines with LoRA adapters share no KV; remove spec.model.adapters"
        )
    speculation = launch_speculation(spec.pools.speculative.speculation)
    found = (
        runtime_of(spec, pool).unshareable(version_of(spec, pool), speculation, _pool_arguments(spec))
        for pool in POOLS
    )
    return next(filter(None, found), None)


def shared(spec: Spec) -> PrefixCache | None:
    """Settings of the prefix cache that the engines share; None if they share none."""
    cache = common(spec)
    return None if cache is None or unshareable(spec) is not None else cache


def master_address(router: Router, mooncake: MooncakeBackend) -> str:
    """The address of the Mooncake master, as host:port."""
    managed = f"{child_name(router, 'mooncake')}.{router.namespace}.svc:{MASTER_PORT}"
    return mooncake.external_master or managed


def separates_tenants(spec: Spec, pool: PoolName) -> bool:
    """Whether the engines of a pool need the plugin to keep the tenants' prefix caches apart, and can load it."""
    auth = spec.gateway.auth
    return (
        auth is not None
        and auth.isolate_cache
        and runtime_of(spec, pool).loads_plugin(version_of(spec, pool))
    )


def launch_settings(router: Router) -> launch.PrefixCache | None:
    """Settings of the engines' command lines; None if the engines do not share a prefix cache."""
    spec = router.spec
    cache = shared(spec)
    if cache is None:
        return None
    if cache.mooncake is not None:
        return launch.MooncakeCache(
            master=master_address(router, cache.mooncake),
            segment_bytes=quantity_bytes(cache.mooncake.segment_size),
            owner=f"{router.namespace}/{router.name}",
            version=version_of(spec, "greedy"),
            weights=""
            if spec.model.source is None
            else spec.model.source.model_dump_json(exclude_defaults=True),
            arguments=tuple(_pool_arguments(spec)["greedy"]),
            protocol="rdma" if cache.mooncake.protocol == "RDMA" else "tcp",
            devices=tuple(cache.mooncake.devices),
        )
    return launch.FileCache(
        directory=CACHE_DIR,
        secret_file=f"{SECRET_DIR}/{SECRET_KEY}",
        max_bytes=quantity_bytes(cache.size or "0"),
        min_free_bytes=quantity_bytes(cache.min_free or "0"),
    )


def cache_entries(namespace: str, router_name: str, value: str) -> dict[str, str]:
    """The value by which the engines authenticate pages, as an entry of the namespace's Secret."""
    return {entry(router_name, "prefix-cache", SECRET_KEY): value}


def cache_claim(router: Router) -> list[Manifest]:
    """The PersistentVolumeClaim of the common prefix cache; empty if there is none to create."""
    cache = common(router.spec)
    return shared_claim(router, "prefix-cache", cache.file.claim if cache and cache.file else None)


def _python_path(spec: Spec, pool: PoolName) -> str:
    """The plugin's directory, followed by the spec's own PYTHONPATH. Raises SpecError if that is not a plain value."""
    own = spec.pools.speculative.env if pool == "speculative" else spec.pools.greedy.env
    values = [variable for variable in (*spec.engine.env, *own) if variable.name == PLUGIN_PATH]
    if not values:
        return PLUGIN_DIR
    if values[-1].value_from is not None:
        raise SpecError(
            f"{PLUGIN_PATH} must be set by value with spec.prefixCache or spec.gateway.auth, not by valueFrom"
        )
    return f"{PLUGIN_DIR}:{values[-1].value or ''}".rstrip(":")


def _plugin_container(settings: Settings) -> Manifest:
    """Copies the plugin from the operator's image to a volume, so that it works with any engine image."""
    return {
        "name": "prefix-cache-plugin",
        "image": settings.plugin_image,
        "command": ["python3", "-m", "dps_sglang.install", PLUGIN_DIR],
        "resources": RESOURCES,
        "securityContext": CONTAINER_SECURITY
        | {"readOnlyRootFilesystem": True, "runAsNonRoot": True, "runAsUser": USER},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [_PLUGIN_MOUNT],
    }


def _file_additions(router: Router, file: FileBackend) -> Manifest:
    """The volumes of backend File. The Secret is readable by every user, because the engine's is that of its image."""
    items = [{"key": entry(router.name, "prefix-cache", SECRET_KEY), "path": SECRET_KEY}]
    secret = {"secretName": CREDENTIALS, "items": items, "defaultMode": 0o444}
    mounts = [
        {"name": "prefix-cache-secret", "mountPath": SECRET_DIR, "readOnly": True},
        {"name": "prefix-cache", "mountPath": CACHE_DIR},
    ]
    return {
        "containers": [{"name": "engine", "volumeMounts": mounts}],
        "volumes": [
            {"name": "prefix-cache-secret", "secret": secret},
            {
                "name": "prefix-cache",
                **shared_volume(router, "prefix-cache", file),
            },
        ],
    }


def _mooncake_additions(mooncake: MooncakeBackend) -> Manifest:
    """What backend Mooncake needs: an address at which other engines reach this one, and memory that RDMA can pin."""
    engine: Manifest = {
        "name": "engine",
        "env": [
            {"name": "MOONCAKE_LOCAL_HOSTNAME", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
        ],
    }
    if mooncake.protocol == "RDMA":
        engine["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return {"containers": [engine]}


def pod_additions(router: Router, pool: PoolName, settings: Settings) -> Manifest:
    """What to merge into the pod spec of a pool's engines; empty if they need no plugin.

    The plugin separates the tenants of /v1/messages even if the engines do not share a prefix cache. Raises SpecError
    if the spec's PYTHONPATH cannot be extended.
    """
    cache = shared(router.spec)
    if cache is None and not separates_tenants(router.spec, pool):
        return {}
    plugin: Manifest = {
        "initContainers": [_plugin_container(settings)],
        "containers": [
            {
                "name": "engine",
                "env": [{"name": PLUGIN_PATH, "value": _python_path(router.spec, pool)}],
                "volumeMounts": [_PLUGIN_MOUNT | {"readOnly": True}],
            }
        ],
        "volumes": [{"name": "prefix-cache-plugin", "emptyDir": {}}],
    }
    storage: Manifest = {}
    if cache is None:
        return plugin
    if cache.mooncake is not None:
        storage = _mooncake_additions(cache.mooncake)
    elif cache.file is not None:
        storage = _file_additions(router, cache.file)
    merged: Manifest = overlay(plugin, storage)
    return merged
