"""Provides a cluster with a real node: an existing one, or one built on this machine."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dps_local.processes import free_ports
from dps_testkit.cluster.kube import BIN, CONTEXT, Kube, Manifest, refuse_unknown, volume
from dps_testkit.errors import RefusedError
from dps_testkit.paths import CLUSTER_SCRIPTS, ROOT
from dps_testkit.waiting import eventually

VOLUMES = 20
START = 'log=$1 pid=$2; shift 2; setsid nohup "$@" >>"$log" 2>&1 </dev/null & echo $! >"$pid"'
"""Starts a process in the same way as `up`: detached, with a log file and a pid file."""
IMAGES = Path.home() / ".cache/dps-router/images"


@dataclass(frozen=True)
class Cluster:
    """A cluster with a node that runs pods.

    load: the command that loads an image archive into the node; empty if the node pulls images from a registry.
    state: the state folder of a self-built cluster, whose processes tests can stop; otherwise None.
    """

    kube: Kube
    load: tuple[str, ...] = ()
    state: Path | None = None

    def load_images(self) -> None:
        """Build all images, using the build cache, and load them into the node."""
        if not self.load:
            return
        subprocess.run([ROOT / "e2e/build-images", IMAGES], check=True, timeout=900)
        for archive in sorted(IMAGES.glob("*.tar")):
            subprocess.run([*self.load, archive], check=True, timeout=300)

    @contextmanager
    def reach(self, kube: Kube, service: str, port: int) -> Iterator[str]:
        """Yield a URL at which a client on this machine can reach a Service."""
        if self.state is not None:  # kube-proxy runs on this machine, so cluster IPs can be reached from it
            yield f"http://{kube.get('service', service)['spec']['clusterIP']}:{port}"
            return
        (local,) = free_ports(1)
        command = ["kubectl", "--kubeconfig", str(kube.kubeconfig), "--namespace", kube.namespace]
        forward = subprocess.Popen([*command, "port-forward", f"service/{service}", f"{local}:{port}"])
        try:
            yield f"http://127.0.0.1:{local}"
        finally:
            forward.terminate()
            forward.wait(timeout=10)

    @contextmanager
    def without_api_server(self) -> Iterator[None]:
        """Kill the API server, and start it again on exit. Raises RefusedError unless the cluster is self-built."""
        if self.state is None:
            raise RefusedError("only the API server of a self-built cluster can be stopped")
        file = self.state / "pids/kube-apiserver"
        pid = int(file.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        os.kill(pid, signal.SIGKILL)
        try:
            yield
        finally:
            while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
                time.sleep(0.1)
            path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
            log = self.state / "log/kube-apiserver.log"
            subprocess.run(
                ["bash", "-c", START, "start", log, file, *command],
                env={**os.environ, "PATH": path},
                check=True,
                timeout=60,
            )
            eventually(lambda: self.kube.kubectl("get", "--raw", "/readyz"))


def storage(folder: Path) -> list[Manifest]:
    """A default storage class, and volumes of it in world-writable folders."""
    manifests: list[Manifest] = [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": "standard",
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
    ]
    for number in range(VOLUMES):
        path = folder / str(number)
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        manifests.append(volume(number, path))
    return manifests


@contextmanager
def _existing(environment: Mapping[str, str]) -> Iterator[Cluster]:
    kube = Kube(Path(environment["E2E_KUBECONFIG"]))
    refuse_unknown(kube, environment.get("E2E_CONTEXT", ""))
    yield Cluster(kube, tuple(shlex.split(environment.get("E2E_LOAD_IMAGE", ""))))


@contextmanager
def _self_built(folder: Path) -> Iterator[Cluster]:
    subprocess.run([CLUSTER_SCRIPTS / "build"], check=True)
    try:
        subprocess.run([CLUSTER_SCRIPTS / "up", folder], check=True, timeout=600)
        kube = Kube(folder / "kubeconfig")
        refuse_unknown(kube, CONTEXT)
        kube.apply(*storage(folder / "volumes"))
        yield Cluster(kube, (str(CLUSTER_SCRIPTS / "load-image"), str(folder)), folder)
    finally:
        subprocess.run([CLUSTER_SCRIPTS / "down", folder], check=True, timeout=300)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster with a node and this checkout's images: that of E2E_KUBECONFIG if it is set, otherwise a new one.

    A cluster created here is deleted on exit. Raises RefusedError if neither is possible.
    """
    if not os.environ.get("E2E_KUBECONFIG") and os.geteuid():
        raise RefusedError("no cluster: set E2E_KUBECONFIG and E2E_CONTEXT, or run as root")
    with _existing(os.environ) if os.environ.get("E2E_KUBECONFIG") else _self_built(folder) as running:
        running.load_images()
        yield running
