"""The Mooncake master of a common prefix cache, which assigns pages to the host memory of the engines."""

from dps_operator.api.prefix_cache import MooncakeMaster
from dps_operator.api.spec import Spec
from dps_operator.api.types import plain_env
from dps_operator.builders.pods import container_resources, pod_template, pull_secrets, restricted
from dps_operator.builders.pool_engines import engine_of, runtime_of
from dps_operator.builders.prefix_cache import MASTER_PORT, shared
from dps_operator.resources import Manifest, Router, child, selector
from dps_operator.settings import Settings

HTTP_PORT = 9003
USER = 65532
RESOURCES: Manifest = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
COMMAND = ("mooncake_master",)
ARGUMENTS = (f"--rpc_port={MASTER_PORT}", f"--metrics_port={HTTP_PORT}")


def managed_master(router: Router) -> MooncakeMaster | None:
    """Settings of the managed master; None if there is none, or if the engines share no pages."""
    cache = shared(router.spec)
    if cache is None or cache.mooncake is None or cache.mooncake.external_master is not None:
        return None
    return cache.mooncake.master or MooncakeMaster()


def _image(spec: Spec) -> str:
    """The image of the greedy pool's engines, because SGLang's images contain Mooncake."""
    engine = engine_of(spec, "greedy")
    return runtime_of(spec, "greedy").image(engine.image, engine.version)


def _container(spec: Spec, master: MooncakeMaster) -> Manifest:
    def probe(**timing: int) -> Manifest:
        return {"httpGet": {"path": "/health", "port": "http"}, **timing}

    return {
        "name": "mooncake",
        "image": master.image or _image(spec),
        "command": list(COMMAND),
        "args": list(ARGUMENTS),
        # SGLang's images request all GPUs of a node from NVIDIA's container runtime.
        "env": plain_env({"NVIDIA_VISIBLE_DEVICES": "void"}),
        "ports": [
            {"name": "rpc", "containerPort": MASTER_PORT, "protocol": "TCP"},
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
        ],
        "resources": container_resources(RESOURCES, master.resources),
        "startupProbe": probe(periodSeconds=2, timeoutSeconds=2, failureThreshold=150),
        "readinessProbe": probe(periodSeconds=5, timeoutSeconds=2, failureThreshold=2),
        "livenessProbe": probe(periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "securityContext": restricted(USER)[1],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def mooncake_master(router: Router, settings: Settings) -> list[Manifest]:
    """The master's Service and Deployment; empty if there is no managed master.

    Two masters would each assign pages, so a rollout stops the old one first.
    """
    master = managed_master(router)
    if master is None:
        return []
    template = pod_template(
        router,
        "mooncake",
        {
            "containers": [_container(router.spec, master)],
            "securityContext": restricted(USER)[0],
            "terminationGracePeriodSeconds": 30,
            **pull_secrets(settings),
        },
        master.pod_template,
    )
    ports = [
        {"name": "rpc", "port": MASTER_PORT, "targetPort": "rpc", "protocol": "TCP"},
        {"name": "http", "port": HTTP_PORT, "targetPort": "http", "protocol": "TCP"},
    ]
    service = {"type": "ClusterIP", "selector": selector(router, "mooncake"), "ports": ports}
    deployment = {
        "replicas": 1,
        "selector": {"matchLabels": selector(router, "mooncake")},
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 3,
        "template": template,
    }
    return [
        child(router, "v1", "Service", "mooncake", spec=service),
        child(router, "apps/v1", "Deployment", "mooncake", spec=deployment),
    ]
