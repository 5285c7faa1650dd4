"""The order in which the engines of both pools start on a GPU that they share.

Two engines that start at the same time would each count the other's memory as free. The init container of the
speculative engine therefore waits for the greedy one, even if both pods start again after a reboot of the node.
"""

from typing import Final

from dps_engines.pools import PoolName
from dps_operator.builders.pods import CONTAINER_SECURITY
from dps_operator.builders.pool_engines import engine_of, load_seconds, runtime_of
from dps_operator.resources import NEIGHBOUR_CONTAINER, Manifest, Router, child_name

WAITING: Final[PoolName] = "speculative"
"""The pool whose engine starts second."""
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
RESOURCES: Final[Manifest] = {
    "requests": {"cpu": "10m", "memory": "32Mi"},
    "limits": {"memory": "128Mi"},
}


def waits(router: Router, name: PoolName) -> bool:
    """Whether the engines of a pool wait for those of the other one before they start."""
    return router.spec.placement == "SharedGPU" and name == WAITING


def waiting_seconds(router: Router, name: PoolName) -> int:
    """Seconds for which the engines of a pool wait at most for those of the other one; 0 if they do not wait.

    They wait no longer than the other engine may take to load, because it may be unable to start.
    """
    return load_seconds(router.spec, FIRST) if waits(router, name) else 0


def start_order(router: Router, name: PoolName) -> Manifest:
    """What to merge into the pod spec of a pool's engines; empty if they do not wait.

    The Service has only engines that are ready. NVIDIA's container runtime gives the container no GPU.
    """
    if not waits(router, name):
        return {}
    own, engine, first = (
        runtime_of(router.spec, name),
        engine_of(router.spec, name),
        runtime_of(router.spec, FIRST),
    )
    url = f"http://{child_name(router, FIRST)}.{router.namespace}.svc:{first.port}{first.health_path}"
    container: Manifest = {
        "name": NEIGHBOUR_CONTAINER,
        "image": own.image(engine.image, engine.version),
        "command": ["python3", "-c", SCRIPT, url, str(waiting_seconds(router, name))],
        "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
        "resources": RESOURCES,
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {"initContainers": [container]}
