"""helm install, kubectl apply, traffic, delete: what a user does, on a node that really runs the pods."""

from itertools import pairwise

from e2e.cluster.clusters import Cluster
from e2e.cluster.harness import Kube, eventually
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
