"""Changes to children by others: managed fields are reverted, other fields and foreign objects are kept."""

from itertools import count

import pytest

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import Operator
from dps_testkit.waiting import eventually
from e2e.control_plane.objects import EVERY_KIND, OWNED, children, deployment, pods, ready

pytest_plugins = ["e2e.cluster.fixtures"]

pytestmark = pytest.mark.usefixtures("operator")


DRIFT: dict[str, tuple[str, str, Manifest]] = {
    "port": ("service", "qwen-gateway", {"spec": {"ports": [{"port": 1, "targetPort": 2}]}}),
    "configuration": ("configmap", "qwen-gateway", {"data": {"config.yaml": "routing: {}"}}),
    "role rules": ("role", "qwen-gateway", {"rules": []}),
    "label": ("service", "qwen-greedy", {"metadata": {"labels": {"app.kubernetes.io/part-of": "x"}}}),
    "replicas": ("deployment", "qwen-gateway", {"spec": {"replicas": 7}}),
}


def owned(live: Manifest) -> Manifest:
    """The fields managed by the operator: the labels, and everything outside `metadata` and `status`."""
    kept = {key: value for key, value in live.items() if key not in ("metadata", "status")}
    return kept | {"labels": live["metadata"]["labels"]}


def test_drift_in_managed_fields_is_reverted(kube: Kube) -> None:
    ready(kube)
    for kind, target, change in DRIFT.values():
        before = owned(kube.get(kind, target))
        kube.patch(kind, target, change)

        def reverted(kind: str = kind, target: str = target, before: Manifest = before) -> None:
            assert owned(kube.get(kind, target)) == before

        eventually(reverted)


def test_unmanaged_fields_are_kept(kube: Kube) -> None:
    ready(kube)
    kube.patch("deployment", "qwen-gateway", {"metadata": {"annotations": {"team": "serving"}}})
    kube.patch("service", "qwen-gateway", {"spec": {"sessionAffinity": "ClientIP"}})
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 1}}})
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert deployment(kube, "gateway")["metadata"]["annotations"]["team"] == "serving"
    assert kube.get("service", "qwen-gateway")["spec"]["sessionAffinity"] == "ClientIP"


def test_deleted_children_are_recreated(kube: Kube) -> None:
    ready(kube)
    before = children(kube)
    kube.kubectl(
        "delete", "deployment,service,configmap,poddisruptionbudget,role,serviceaccount", "-l", OWNED
    )

    def recreated() -> None:
        assert children(kube) == before

    eventually(recreated)
    kube.until("qwen", Ready="True", Progressing="Settled")


def test_deleted_password_is_regenerated_and_redis_and_gateways_restart(kube: Kube) -> None:
    ready(kube)
    old = kube.get("secret", "dps-router-credentials")["data"]
    before = set(pods(kube, "gateway")), kube.get("pod", "qwen-redis-0")["metadata"]["uid"]
    kube.kubectl("delete", "secret", "dps-router-credentials")
    kube.kubectl("annotate", "dps/qwen", "password=changed")

    def restarted() -> None:
        assert kube.get("secret", "dps-router-credentials")["data"] != old
        assert set(pods(kube, "gateway")).isdisjoint(before[0])
        assert kube.get("pod", "qwen-redis-0")["metadata"]["uid"] != before[1]

    eventually(restarted)
    kube.until("qwen", Ready="True", Progressing="Settled")


def test_settled_router_causes_no_writes(kube: Kube, operator: Operator) -> None:
    ready(kube)
    number = count()

    def check() -> None:
        """A change of a pod causes a reconcile, which changes nothing."""
        reconciles, writes = operator.reconciles(), operator.writes()
        versions = {item["metadata"]["resourceVersion"] for item in kube.list(EVERY_KIND, OWNED)}
        kube.patch("pod", "qwen-redis-0", {"metadata": {"annotations": {"probe": str(next(number))}}})
        eventually(lambda: _has_reconciled(operator, reconciles))
        assert operator.writes() == writes
        assert {item["metadata"]["resourceVersion"] for item in kube.list(EVERY_KIND, OWNED)} == versions

    eventually(check)  # the first time, some pods may still be starting
    for _ in range(3):
        check()


def _has_reconciled(operator: Operator, before: int) -> None:
    assert operator.reconciles() > before
    assert "dps_operator_queue_length 0.0" in operator.get("/metrics")
