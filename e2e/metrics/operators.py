"""Three operators on a control plane: one that works, one that may only look, one that may do nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import Operator, service_account_kubeconfig
from e2e.metrics.prometheus import Target

SYSTEM, ACCOUNT = "dps-system", "dps-dps-router"
"""Whose rights the chart gives to its operator, where the fixtures install it."""
READY, WAITING = "qwen", "waiting"


@dataclass(frozen=True)
class Operators:
    """The processes by their names; the namespace of their DPSRouters."""

    running: dict[str, Operator]
    kube: Kube

    def targets(self) -> list[Target]:
        """What the chart's ServiceMonitor selects, had each a namespace of its own."""
        return [
            Target(f"http://127.0.0.1:{operator.port}", {"namespace": name, "pod": f"{name}-0"})
            for name, operator in self.running.items()
        ]

    def change(self) -> None:
        """Give them something to do."""
        self.kube.patch("dpsrouter", READY, {"spec": {"routing": {"thresholdTokens": 512}}})

    def stop(self) -> None:
        """End them all."""
        for operator in self.running.values():
            operator.stop()


@contextmanager
def operators(installed: Kube, folder: Path) -> Iterator[Operators]:
    """They run, one DPSRouter will be Ready, and one waits for a volume that never comes."""
    with installed.scratch() as kube:
        looker, nobody = f"{kube.namespace}-looker", f"{kube.namespace}-nobody"
        for account in (looker, nobody):
            kube.kubectl("create", "serviceaccount", account)
        kube.kubectl("create", "clusterrole", looker, "--verb=get,list,watch", "--resource=*.*")
        kube.kubectl(
            "create", "clusterrolebinding", looker, f"--clusterrole={looker}",
            f"--serviceaccount={kube.namespace}:{looker}",
        )  # fmt: skip
        running: dict[str, Operator] = {}
        made = Operators(running, kube)
        try:
            for name, owner, account in (
                ("works", Kube(kube.kubeconfig, SYSTEM), ACCOUNT),
                ("looks", kube, looker),
                ("may-nothing", kube, nobody),
            ):
                kubeconfig = service_account_kubeconfig(owner, account, folder / f"{name}.yaml")
                log = folder / f"operator-{name}.log"
                running[name] = Operator(kubeconfig, log, "--namespace", kube.namespace)
            kube.apply(_router(READY), _router(WAITING, cache={"size": "1Gi", "storageClassName": "none"}))
            yield made
        finally:
            made.stop()
            kube.kubectl("delete", "clusterrolebinding,clusterrole", looker)


def _router(name: str, **model: Manifest) -> Manifest:
    return {
        "apiVersion": "dpsrouter.io/v1alpha1",
        "kind": "DPSRouter",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "Qwen/Qwen2.5-7B-Instruct", **model},
            "pools": {"speculative": {"speculation": {"algorithm": "Ngram"}}},
        },
    }
