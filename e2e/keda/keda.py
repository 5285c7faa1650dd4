"""KEDA's operator and metrics server as local processes, with the permissions of KEDA's own roles."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dps_local.assets import cache_dir
from dps_local.processes import Child, free_ports
from dps_testkit.certificates import certify
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import service_account_kubeconfig
from dps_testkit.errors import RefusedError
from dps_testkit.http import status_of

HERE = Path(__file__).parent
VERSION = (HERE / "version").read_text().strip()
FOLDER = cache_dir() / f"keda-{VERSION}"
"""Where `install` puts KEDA."""
INSTALLED = (FOLDER / "installed").exists()
NAMESPACE, ACCOUNT = "keda", "keda-operator"
API_SERVICE = "v1beta1.external.metrics.k8s.io"


@asynccontextmanager
async def keda(cluster: Kube, folder: Path) -> AsyncIterator[None]:
    """Run KEDA on a cluster. The API server must reach this machine as `localhost`."""
    system = Kube(cluster.kubeconfig, NAMESPACE)
    system.kubectl("create", "namespace", NAMESPACE)
    system.run("kubectl", "apply", "--server-side", "--filename", str(FOLDER / "manifests"))
    kubeconfig = service_account_kubeconfig(system, ACCOUNT, folder / "keda.yaml")
    certify(folder / "tls.crt", folder / "tls.key")
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
    health, scalers, metrics, api = free_ports(4)
    environment = {
        "KUBECONFIG": str(kubeconfig),
        "POD_NAMESPACE": NAMESPACE,
        "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
        "WATCH_NAMESPACE": "",
    }

    async def operator_ready() -> bool:
        return await status_of(f"http://127.0.0.1:{health}/readyz") == 200

    async def metrics_served() -> bool:
        try:
            await asyncio.to_thread(system.kubectl, "get", "--raw", "/apis/external.metrics.k8s.io/v1beta1")
        except RefusedError:
            return False
        return True

    operator = Child(
        "keda-operator",
        [
            str(FOLDER / "keda"),
            "--enable-prometheus-metrics=false",
            f"--health-probe-bind-address=127.0.0.1:{health}",
            f"--metrics-service-bind-address=127.0.0.1:{scalers}",
            f"--cert-dir={folder}",
        ],
        folder / "keda-operator.log",
        operator_ready,
        environment,
    )
    adapter = Child(
        "keda-adapter",
        [
            str(FOLDER / "keda-adapter"),
            "--bind-address=127.0.0.1",
            f"--secure-port={api}",
            f"--port={metrics}",
            f"--metrics-service-address=localhost:{scalers}",
            f"--cert-dir={folder}",
            f"--tls-cert-file={folder / 'tls.crt'}",
            f"--tls-private-key-file={folder / 'tls.key'}",
            *(f"--{name}-kubeconfig={kubeconfig}" for name in ("authentication", "authorization", "lister")),
        ],
        folder / "keda-adapter.log",
        metrics_served,
        environment,
    )
    try:
        operator.start()
        await operator.wait_ready()
        adapter.start()
        system.apply(*_external_metrics(api))
        await adapter.wait_ready()
        yield
    finally:
        # An APIService without a server would prevent the deletion of namespaces.
        system.kubectl("delete", "apiservice", API_SERVICE, "--ignore-not-found")
        await asyncio.gather(operator.stop(), adapter.stop())
        system.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def _external_metrics(port: int) -> list[Manifest]:
    """Makes the API server relay requests for external metrics to a port of this machine."""
    name = "keda-metrics-apiserver"
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"type": "ExternalName", "externalName": "localhost"},
    }
    group, version = "external.metrics.k8s.io", "v1beta1"
    api_service: Manifest = {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": API_SERVICE},
        "spec": {
            "service": {"namespace": NAMESPACE, "name": name, "port": port},
            "group": group,
            "version": version,
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }
    return [service, api_service]
