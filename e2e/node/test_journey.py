"""helm install, kubectl apply, traffic, delete: what a user does, on a node that really runs the pods."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, pairwise
from threading import Event, Thread

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster
from dps_testkit.waiting import eventually
from e2e.node.conftest import A100, READY_SECONDS, RELEASE, emulated
from e2e.node.sessions import turns

OURS = "dpsrouter.io/router=emulated"
LEFT = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,poddisruptionbudgets,networkpolicies"


def test_the_release_tests_itself(system: Kube) -> None:
    assert "Phase:          Succeeded" in system.helm("test", RELEASE, "--timeout", "100s")


def test_a_router_that_asks_for_a100s_becomes_ready(kube: Kube) -> None:
    kube.apply(emulated())
    kube.until("emulated", READY_SECONDS, Ready="True", Progressing="Settled")
    engines = [
        pod
        for pool in ("speculative", "greedy")
        for pod in kube.list("pods", f"{OURS},dpsrouter.io/component={pool}")
    ]
    assert [pod["spec"]["containers"][0]["resources"]["limits"] for pod in engines] == [
        {name: str(count) for name, count in A100.items()}
    ] * 2
    assert all(pod["spec"]["affinity"]["nodeAffinity"] for pod in engines)


def test_the_first_request_after_ready_is_answered(node: Cluster, kube: Kube) -> None:
    router = emulated("eager")
    router["spec"]["gateway"]["replicas"] = 1
    with changing_services(kube):
        kube.apply(router)
        kube.kubectl("wait", "dpsrouter/eager", "--for=condition=Ready", "--timeout=110s")
        with node.reach(kube, "eager-gateway", 8000) as url:
            assert [turn.number for turn in turns(url, "emulated", count=1)] == [1]
    kube.kubectl("delete", "dpsrouter", "eager")


def test_get_dps_tells_what_one_wants_to_know(kube: Kube) -> None:
    header, row = kube.kubectl("get", "dps").splitlines()
    assert header.split() == ["NAME", "READY", "POLICY", "THRESHOLD", "SPEC", "GREEDY", "GATEWAY", "AGE"]
    assert row.split()[:-1] == ["emulated", "True", "DeltaPrefill", "128", "1", "1", "2"]


def test_sessions_through_the_service_are_routed_by_their_growth(node: Cluster, kube: Kube) -> None:
    with node.reach(kube, "emulated-gateway", 8000) as url:
        session = list(turns(url, "emulated", count=6))
    assert [(turn.number, turn.pool, turn.reason) for turn in session] == [
        (1, "greedy", "over_threshold"),
        (2, "speculative", "within_threshold"),
        (3, "greedy", "over_threshold"),
        (4, "speculative", "within_threshold"),
        (5, "greedy", "over_threshold"),
        (6, "speculative", "within_threshold"),
    ]
    lengths = [turn.prompt_tokens for turn in session]
    assert [turn.engine_prompt_tokens for turn in session] == lengths
    assert [turn.delta_tokens for turn in session] == [
        lengths[0],
        *(after - before for before, after in pairwise(lengths)),
    ]


def test_deleting_it_leaves_nothing(kube: Kube) -> None:
    kube.kubectl("delete", "dpsrouter", "emulated")

    def nothing() -> None:
        assert kube.list(LEFT, OURS) == []

    eventually(nothing, READY_SECONDS)


def test_uninstalling_leaves_nothing(system: Kube) -> None:
    system.helm("uninstall", RELEASE, "--wait")
    system.kubectl("delete", "crd", "dpsrouters.dpsrouter.io")

    def nothing() -> None:
        ours = f"app.kubernetes.io/instance={RELEASE}"
        assert system.list(f"clusterroles,clusterrolebindings,{LEFT}", ours) == []

    eventually(nothing, READY_SECONDS)
    assert RELEASE not in system.helm("list", "--short").split()


@contextmanager
def changing_services(kube: Kube) -> Iterator[None]:
    """Endpoints of another Service that come and go, as on any busy cluster: kube-proxy is behind with them all."""
    ended = Event()

    def change() -> None:
        for last in cycle(range(1, 255)):
            kube.apply(endpoint(f"192.0.2.{last}"))
            if ended.wait(0.1):
                return

    kube.kubectl("create", "service", "clusterip", "other", "--tcp=80")
    changes = Thread(target=change)
    changes.start()
    try:
        yield
    finally:
        ended.set()
        changes.join()
        kube.kubectl("delete", "service/other", "endpointslice/other")


def endpoint(address: str) -> Manifest:
    """The only endpoint of the Service `other`."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "other", "labels": {"kubernetes.io/service-name": "other"}},
        "addressType": "IPv4",
        "ports": [{"port": 80}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
    }
