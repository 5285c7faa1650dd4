"""The prefix caches of the engines: the plugin in their pods, and the Mooncake master of a common one."""

from typing import Any

from dps_engines.launch import MooncakeCache
from dps_operator.api import quantity_bytes
from dps_operator.build.pods import (
    READ_ONLY,
    container_ports,
    container_resources,
    plain_env,
    pod_template,
    probes,
    service,
)
from dps_operator.effective import EffectivePool, Router
from dps_operator.errors import SpecError
from dps_operator.objects import Manifest, child_manifest, child_name, selector
from dps_operator.settings import Settings

PLUGIN_DIR = "/opt/dps-plugin"
PLUGIN_PATH = "PYTHONPATH"
MASTER_PORT = 50051
USER = 65532
"""UID of the operator's image, and of the Mooncake master."""
PLUGIN_RESOURCES: Manifest = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}}
_PLUGIN_MOUNT: Manifest = {"name": "prefix-cache-plugin", "mountPath": PLUGIN_DIR}


def _separates_tenants(router: Router, pool: EffectivePool) -> bool:
    """Whether the engines of a pool need the plugin to keep the tenants' prefix caches apart, and can load it."""
    auth = router.spec.gateway.auth
    return auth is not None and auth.isolate_cache and pool.runtime.loads_plugin(pool.version)


def template_inputs(router: Router, pool: EffectivePool) -> list[Any]:
    """The settings, as JSON, on which the additions to a pool's pod template depend. Defaults are left out."""
    if router.shared_cache is None:
        return ["plugin"] if _separates_tenants(router, pool) else []
    master = {"mooncake": {"master"}}
    return [router.shared_cache.model_dump(mode="json", exclude_defaults=True, exclude=master)]


def launch_settings(router: Router) -> MooncakeCache | None:
    """Settings of the engines' command lines; None if the engines do not share a prefix cache."""
    spec = router.spec
    if router.shared_cache is None or router.shared_cache.mooncake is None:
        return None
    mooncake, greedy = router.shared_cache.mooncake, router.pools["greedy"]
    managed = f"{child_name(router, 'mooncake')}.{router.namespace}.svc:{MASTER_PORT}"
    return MooncakeCache(
        master=mooncake.external_master or managed,
        segment_bytes=quantity_bytes(mooncake.segment_size),
        owner=f"{router.namespace}/{router.name}",
        version=greedy.version,
        weights="" if spec.model.source is None else spec.model.source.model_dump_json(exclude_defaults=True),
        arguments=tuple(greedy.all_args),
        protocol="rdma" if mooncake.protocol == "RDMA" else "tcp",
        devices=tuple(mooncake.devices),
    )


def _python_path(pool: EffectivePool) -> str:
    """The plugin's directory, followed by the spec's own PYTHONPATH. Raises SpecError if that is not a plain value."""
    values = [variable for variable in pool.all_env if variable.name == PLUGIN_PATH]
    if not values:
        return PLUGIN_DIR
    if values[-1].value_from is not None:
        raise SpecError(
            f"{PLUGIN_PATH} must be set by value with spec.prefixCache or spec.gateway.auth, not by valueFrom"
        )
    return f"{PLUGIN_DIR}:{values[-1].value or ''}".rstrip(":")


def pod_additions(router: Router, pool: EffectivePool, settings: Settings) -> Manifest:
    """What to merge into the pod spec of a pool's engines; empty if they need no plugin.

    An init container copies the plugin from the operator's image to a volume, so that it works with any engine image.
    It separates the tenants of /v1/messages even if the engines do not share a prefix cache. Raises SpecError
    if the spec's PYTHONPATH cannot be extended.
    """
    cache = router.shared_cache
    if cache is None and not _separates_tenants(router, pool):
        return {}
    engine: Manifest = {
        "name": "engine",
        "env": plain_env({PLUGIN_PATH: _python_path(pool)}),
        "volumeMounts": [_PLUGIN_MOUNT | {"readOnly": True}],
    }
    if cache is not None and cache.mooncake is not None:
        # The address at which other engines reach this one.
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        engine["env"].append({"name": "MOONCAKE_LOCAL_HOSTNAME", "valueFrom": address})
        if cache.mooncake.protocol == "RDMA":
            # RDMA pins memory.
            engine["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    plugin = {
        "name": "prefix-cache-plugin",
        "image": settings.plugin_image,
        "command": ["python3", "-m", "dps_sglang.install", PLUGIN_DIR],
        "resources": PLUGIN_RESOURCES,
        "securityContext": READ_ONLY | {"runAsNonRoot": True, "runAsUser": USER},
        "volumeMounts": [_PLUGIN_MOUNT],
    }
    return {
        "initContainers": [plugin],
        "containers": [engine],
        "volumes": [{"name": "prefix-cache-plugin", "emptyDir": {}}],
    }


HTTP_PORT = 9003
PORTS = {"rpc": MASTER_PORT, "http": HTTP_PORT}
MASTER_RESOURCES: Manifest = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}


def mooncake_master(router: Router, settings: Settings) -> list[Manifest]:
    """The master's Service and Deployment; empty if there is no managed master.

    Two masters would each assign pages, so a rollout stops the old one first.
    """
    master = router.mooncake_master
    if master is None:
        return []
    container = {
        "name": "mooncake",
        # SGLang's images contain Mooncake.
        "image": master.image or router.pools["greedy"].image,
        "command": ["mooncake_master"],
        "args": [f"--rpc_port={MASTER_PORT}", f"--metrics_port={HTTP_PORT}"],
        # SGLang's images request all GPUs of a node from NVIDIA's container runtime.
        "env": plain_env({"NVIDIA_VISIBLE_DEVICES": "void"}),
        "ports": container_ports(**PORTS),
        "resources": container_resources(MASTER_RESOURCES, master.resources),
        **probes({"httpGet": {"path": "/health", "port": "http"}}),
    }
    pod = {"containers": [container], "terminationGracePeriodSeconds": 30}
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": selector(router, "mooncake")},
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 3,
        "template": pod_template(router, "mooncake", settings, pod, master.pod_template, user=USER),
    }
    return [
        service(router, "mooncake", PORTS),
        child_manifest(router, "Deployment", "mooncake", spec=deployment),
    ]
