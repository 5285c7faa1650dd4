"""Three operators on a control plane: with the chart's permissions, with read access only, and without any."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import Operator, service_account_kubeconfig
from e2e.metrics.prometheus import Target

SYSTEM, ACCOUNT = "dps-system", "dps-dps-router"
"""Namespace and ServiceAccount of the chart's operator, as installed by the fixtures."""
READY, WAITING, SUSPENDED = "qwen", "waiting", "suspended"


@dataclass(frozen=True)
class Operators:
    """The operator processes by name, and the namespace of their DPSRouters."""

    running: dict[str, Operator]
    kube: Kube

    def targets(self) -> list[Target]:
        """The targets of the chart's ServiceMonitor, with a separate namespace for each operator."""
        return [
            Target(f"http://127.0.0.1:{operator.port}", {"namespace": name, "pod": f"{name}-0"})
            for name, operator in self.running.items()
        ]

    def change(self) -> None:
        """Change a DPSRouter, so that every operator reconciles it."""
        self.kube.patch("dpsrouter", READY, {"spec": {"routing": {"thresholdTokens": 512}}})

    def stop(self) -> None:
        """Stop all operators."""
        for operator in self.running.values():
            operator.stop()


@contextmanager
def operators(installed: Kube, folder: Path) -> Iterator[Operators]:
    """Run the operators with DPSRouters that become ready, wait for a volume that does not exist, and are suspended."""
    with installed.scratch() as kube:
        reader, unprivileged = f"{kube.namespace}-reader", f"{kube.namespace}-unprivileged"
        for account in (reader, unprivileged):
            kube.kubectl("create", "serviceaccount", account)
        kube.kubectl("create", "clusterrole", reader, "--verb=get,list,watch", "--resource=*.*")
        kube.kubectl(
            "create", "clusterrolebinding", reader, f"--clusterrole={reader}",
            f"--serviceaccount={kube.namespace}:{reader}",
        )  # fmt: skip
        running: dict[str, Operator] = {}
        started = Operators(running, kube)
        try:
            for name, owner, account in (
                ("working", Kube(kube.kubeconfig, SYSTEM), ACCOUNT),
                ("read-only", kube, reader),
                ("unprivileged", kube, unprivileged),
            ):
                kubeconfig = service_account_kubeconfig(owner, account, folder / f"{name}.yaml")
                log = folder / f"operator-{name}.log"
                running[name] = Operator(kubeconfig, log, "--namespace", kube.namespace)
            waiting = _router(WAITING)
            waiting["spec"]["model"]["cache"] = {"size": "1Gi", "storageClassName": "none"}
            kube.apply(_router(READY), waiting, _router(SUSPENDED, suspend=True))
            yield started
        finally:
            started.stop()
            kube.kubectl("delete", "clusterrolebinding,clusterrole", reader)


def _router(name: str, **fields: bool) -> Manifest:
    return {
        "apiVersion": "dpsrouter.io/v1alpha1",
        "kind": "DPSRouter",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "Qwen/Qwen2.5-7B-Instruct"},
            "pools": {"speculative": {"speculation": {"algorithm": "Ngram"}}},
            **fields,
        },
    }
