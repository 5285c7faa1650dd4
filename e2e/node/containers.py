"""Kills containers as a crash does: with SIGKILL, and without Kubernetes' knowledge."""

import subprocess

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster
from dps_testkit.waiting import eventually
from e2e.node.conftest import READY_SECONDS


def containerd(node: Cluster, *command: str) -> None:
    """Run `ctr` on the node's containerd."""
    address = ("--address", f"{node.state}/containerd.sock", "--namespace", "k8s.io")
    subprocess.run(["ctr", *address, *command], check=True, timeout=60)


def kill(node: Cluster, pod: Manifest) -> None:
    """Kill all processes of a pod's only container."""
    name = _container(pod)["containerID"].removeprefix("containerd://")
    containerd(node, "tasks", "kill", "--signal", "SIGKILL", name)


def until_restarted(kube: Kube, pod: Manifest, seconds: float = READY_SECONDS) -> None:
    """Wait until the container of a pod has been started again and is ready."""

    def restarted() -> None:
        now = _container(kube.get("pod", pod["metadata"]["name"]))
        assert now["restartCount"] > _container(pod)["restartCount"]
        assert now["ready"]

    eventually(restarted, seconds)


def _container(pod: Manifest) -> Manifest:
    (container,) = pod["status"]["containerStatuses"]
    found: Manifest = container
    return found
