"""`helm uninstall` and the deletion of the CRD remove every object of the release."""

from dps_testkit.cluster.kube import Kube
from dps_testkit.waiting import eventually
from e2e.node.conftest import LEFTOVER_KINDS, READY_SECONDS, RELEASE


def test_uninstall_leaves_no_objects(system: Kube) -> None:
    system.helm("uninstall", RELEASE, "--wait")
    system.kubectl("delete", "crd", "dpsrouters.dpsrouter.io")

    def nothing_left() -> None:
        instance = f"app.kubernetes.io/instance={RELEASE}"
        assert system.list(f"clusterroles,clusterrolebindings,{LEFTOVER_KINDS}", instance) == []

    eventually(nothing_left, READY_SECONDS)
    assert RELEASE not in system.helm("list", "--short").split()
