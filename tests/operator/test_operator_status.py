"""The conditions, the rest of the status, and Events for changes."""

from dataclasses import replace
from typing import Any

import pytest

from dps_operator.api import ConditionType
from dps_operator.conditions import StatusInput, conditions
from dps_operator.diagnose import Problem
from dps_operator.effective import Router
from dps_operator.errors import ClusterError
from dps_operator.observe import NO_REPLICAS, Child, observed_child
from dps_operator.status import build_status, events, invalid_spec_status
from dps_testkit.operator.routers import SMALLEST, router, smallest
from tests.operator.objects import observed_pod, replicas, workload

CRASH = Problem("CrashLooping", "pod qwen-speculative-1 ended with exit code 1: no memory")


def family(**changed: Child) -> dict[tuple[str, str], Child]:
    """Children that are all ready, except for the changed ones."""
    made = {name: workload(name, replicas(2, 2) if name == "gateway" else replicas()) for name in COMPONENTS}
    made["redis"] = replace(made["redis"], kind="StatefulSet")
    made |= changed
    config = replace(made["gateway"], kind="ConfigMap", replicas=NO_REPLICAS)
    return {(one.kind, one.name): one for one in (*made.values(), config)}


COMPONENTS = ("speculative", "greedy", "gateway", "redis")
HEALTHY = StatusInput(children=family())


def condition_reasons(seen: StatusInput, **spec: Any) -> dict[str, tuple[str, str]]:
    found = conditions(router({**SMALLEST, **spec}), seen)
    return {one.type: (one.status, one.reason) for one in found}


def test_healthy_router_has_all_conditions() -> None:
    assert condition_reasons(HEALTHY) == {
        "Ready": ("True", "Serving"),
        "Progressing": ("False", "Settled"),
        "SpecValid": ("True", "Accepted"),
        "SpeculativePoolReady": ("True", "AllReplicasReady"),
        "GreedyPoolReady": ("True", "AllReplicasReady"),
        "SessionStoreReady": ("True", "AllReplicasReady"),
        "GatewayReady": ("True", "AllReplicasReady"),
    }


CASES: dict[str, tuple[StatusInput, dict[str, tuple[str, str]]]] = {
    "no children yet": (
        StatusInput(),
        {
            "Ready": ("False", "NotCreated"),
            "Progressing": ("True", "RollingOut"),
            "GatewayReady": ("False", "NotCreated"),
        },
    ),
    "crash-looping pool": (
        StatusInput(
            family(speculative=workload("speculative", replicas(0))), [observed_pod("speculative", CRASH)]
        ),
        {
            "Ready": ("False", "CrashLooping"),
            "SpeculativePoolReady": ("False", "CrashLooping"),
            "GreedyPoolReady": ("True", "AllReplicasReady"),
        },
    ),
    "one of three replicas ready": (
        StatusInput(
            family(speculative=workload("speculative", replicas(1, 3))),
            [observed_pod("speculative", CRASH)],
        ),
        {
            "Ready": ("True", "Serving"),
            "SpeculativePoolReady": ("True", "SomeReplicasReady"),
            "Progressing": ("True", "RollingOut"),
        },
    ),
    "pod creation forbidden": (
        StatusInput(family(greedy=workload("greedy", replicas(0, failure="exceeded quota")))),
        {"Ready": ("False", "PodsForbidden"), "GreedyPoolReady": ("False", "PodsForbidden")},
    ),
    "replica of the old template": (
        StatusInput(family(greedy=workload("greedy", replicas(1, settled=False)))),
        {"Ready": ("True", "Serving"), "Progressing": ("True", "RollingOut")},
    ),
    "failed rollout": (
        StatusInput(
            family(speculative=workload("speculative", replicas(1, settled=False, stalled="deadline"))),
            [observed_pod("speculative", CRASH)],
        ),
        {
            "Ready": ("True", "Serving"),
            "Progressing": ("False", "ProgressDeadlineExceeded"),
            "SpeculativePoolReady": ("True", "AllReplicasReady"),
        },
    ),
    "invalid spec": (
        replace(HEALTHY, invalid="spec.engine.args: --port is set by the operator; remove it"),
        {
            "Ready": ("False", "InvalidSpec"),
            "SpecValid": ("False", "InvalidSpec"),
            "GatewayReady": ("True", "AllReplicasReady"),
        },
    ),
    "API server failure": (
        replace(HEALTHY, failure=ClusterError("etcdserver: request timed out")),
        {"Ready": ("True", "Serving"), "Progressing": ("True", "Retrying")},
    ),
    "pool scaled to zero": (
        StatusInput(family(greedy=workload("greedy", replicas(0, 0)))),
        {
            "Ready": ("False", "ScaledToZero"),
            "GreedyPoolReady": ("False", "ScaledToZero"),
            "Progressing": ("False", "Settled"),
        },
    ),
}


@pytest.mark.parametrize(("seen", "wanted"), CASES.values(), ids=CASES.keys())
def test_conditions_follow_from_observations(seen: StatusInput, wanted: dict[str, tuple[str, str]]) -> None:
    found = condition_reasons(seen)
    assert {kind: found[kind] for kind in wanted} == wanted


SCALED = {"greedy": {"autoscaling": {"maxReplicas": 4}}, **SMALLEST["pools"]}
SCALED_TO_ZERO = {"greedy": {"autoscaling": {"minReplicas": 0, "maxReplicas": 1}}, **SMALLEST["pools"]}
NO_METRIC = "unable to get metric dps_demand: no metrics returned from custom metrics API"


def autoscaler(conditions: list[dict[str, str]]) -> StatusInput:
    """Healthy children with the autoscaler of the greedy pool."""
    found = observed_child(
        {
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "qwen-greedy"},
            "status": {"conditions": conditions},
        }
    )
    return StatusInput(children=family() | {(found.kind, found.name): found})


AUTOSCALERS: dict[str, tuple[StatusInput, tuple[str, str]]] = {
    "not created": (HEALTHY, ("Unknown", "NotEvaluated")),
    "not evaluated": (autoscaler([]), ("Unknown", "NotEvaluated")),
    "metric available": (
        autoscaler([{"type": "ScalingActive", "status": "True"}]),
        ("True", "AutoscalersActive"),
    ),
    "scaled to zero": (
        autoscaler([{"type": "ScalingActive", "status": "False", "reason": "ScalingDisabled"}]),
        ("True", "AutoscalersActive"),
    ),
    "metric missing": (
        autoscaler([{"type": "ScalingActive", "status": "False", "message": NO_METRIC}]),
        ("False", "AutoscalerFailed"),
    ),
}


@pytest.mark.parametrize(("seen", "wanted"), AUTOSCALERS.values(), ids=AUTOSCALERS.keys())
def test_autoscaler_without_its_metric_is_reported(seen: StatusInput, wanted: tuple[str, str]) -> None:
    found = condition_reasons(seen, pools=SCALED)
    assert (found["AutoscalingActive"], found["Ready"]) == (wanted, ("True", "Serving"))


def routed(*parents: list[dict[str, Any]]) -> StatusInput:
    """Healthy children with an HTTPRoute with two parents and the third generation. parents: the conditions of each."""
    found = observed_child(
        {
            "kind": "HTTPRoute",
            "metadata": {"name": "qwen-gateway", "generation": 3},
            "spec": {"parentRefs": [{"name": "public"}, {"name": "internal"}]},
            "status": {"parents": [{"conditions": conditions} for conditions in parents]},
        }
    )
    return StatusInput(children=family() | {(found.kind, found.name): found})


def route_condition(type: str, status: str, generation: int = 3) -> dict[str, Any]:
    """A condition that the controller of a Gateway has written."""
    return {"type": type, "status": status, "reason": "R", "message": "m", "observedGeneration": generation}


ACCEPTED = [route_condition("Accepted", "True"), route_condition("ResolvedRefs", "True")]
ROUTES: dict[str, tuple[StatusInput, tuple[str, str]]] = {
    "not created": (HEALTHY, ("Unknown", "NotEvaluated")),
    "evaluated by no Gateway": (routed(), ("Unknown", "NotEvaluated")),
    "evaluated by one of two Gateways": (routed(ACCEPTED), ("Unknown", "NotEvaluated")),
    "accepted before it was changed": (
        routed(ACCEPTED, [route_condition("Accepted", "True", generation=2)]),
        ("Unknown", "NotEvaluated"),
    ),
    "accepted by both": (routed(ACCEPTED, ACCEPTED), ("True", "RouteServed")),
    "refused by one": (
        routed(ACCEPTED, [route_condition("Accepted", "False")]),
        ("False", "RouteRejected"),
    ),
    "backend not resolved": (
        routed([route_condition("Accepted", "True"), route_condition("ResolvedRefs", "False")]),
        ("False", "RouteRejected"),
    ),
}


@pytest.mark.parametrize(("seen", "wanted"), ROUTES.values(), ids=ROUTES.keys())
def test_route_that_a_gateway_does_not_serve_is_reported(seen: StatusInput, wanted: tuple[str, str]) -> None:
    parents = [{"name": "public"}, {"name": "internal"}]
    found = condition_reasons(seen, gateway={"httpRoute": {"parentRefs": parents}})
    assert (found["RouteAccepted"], found["Ready"]) == (wanted, ("True", "Serving"))


def forbidden(**counts: Any) -> StatusInput:
    """A quota forbids a pod of the speculative pool, of which other pods are ready."""
    refused = replicas(1, failure="exceeded quota", **counts)
    return StatusInput(family(speculative=workload("speculative", refused)))


QUOTA = "pods cannot be created: exceeded quota"
CAUSES: dict[str, tuple[StatusInput, ConditionType, str]] = {
    "pods of a rollout": (
        forbidden(settled=False),
        "Progressing",
        f"the speculative pool is rolling out: {QUOTA}",
    ),
    "pods of a failed rollout": (
        forbidden(settled=False, stalled="ReplicaSet has timed out progressing."),
        "Ready",
        f"requests are served by both pools; the rollout of the speculative pool has failed: {QUOTA}",
    ),
}


@pytest.mark.parametrize(("seen", "condition", "message"), CAUSES.values(), ids=CAUSES.keys())
def test_cause_of_a_rollout_that_does_not_end_is_reported_although_requests_are_served(
    seen: StatusInput, condition: ConditionType, message: str
) -> None:
    found = {item.type: item for item in conditions(router(SMALLEST), seen)}
    assert found["Ready"].status == "True"
    assert found[condition].message == message


@pytest.mark.parametrize("scaled", [{"gpuBudget": {"gpus": 2}}, {"pools": SCALED_TO_ZERO}])
def test_demand_of_a_suspended_router_is_no_condition(scaled: dict[str, Any]) -> None:
    for suspend in (False, True):
        found = conditions(router({**SMALLEST, **scaled, "suspend": suspend}), HEALTHY)
        assert ("DemandMeasured" in {item.type for item in found}) is not suspend


def test_status_has_conditions_replicas_and_routing() -> None:
    made = build_status(smallest(greedy={"scaling": "External"}), HEALTHY, {}, "2026-01-01T00:00:00Z")
    assert made.pop("conditions")[0] == {
        "type": "Ready",
        "status": "True",
        "reason": "Serving",
        "message": "requests are served by both pools",
        "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    assert made == {
        "observedGeneration": 1,
        "url": "http://qwen-gateway.serving.svc:8000",
        "pools": {
            "speculative": {"replicas": 1, "readyReplicas": 1},
            "greedy": {"replicas": 1, "readyReplicas": 1, "scaling": "External"},
        },
        "gateway": {
            "replicas": 2,
            "readyReplicas": 2,
            "selector": "app.kubernetes.io/name=dps-router,app.kubernetes.io/instance=qwen,"
            "app.kubernetes.io/component=gateway,dpsrouter.io/router=qwen,dpsrouter.io/component=gateway",
        },
        "routing": {"policy": "DeltaPrefill", "thresholdTokens": 128},
    }


def test_transition_time_changes_only_with_the_status() -> None:
    first = build_status(router(SMALLEST), StatusInput(), {}, "t1")
    second = build_status(router(SMALLEST), StatusInput(invalid="x"), first, "t2")
    third = build_status(router(SMALLEST), HEALTHY, second, "t3")
    times = [made["conditions"][0]["lastTransitionTime"] for made in (first, second, third)]
    assert times == ["t1", "t1", "t3"]


def test_unparsable_spec_keeps_the_rest_of_the_status() -> None:
    first = build_status(router(SMALLEST), HEALTHY, {}, "t1")
    made = invalid_spec_status("spec.pools: missing", first, 2, "t2")
    assert {one["type"] for one in made["conditions"]} == {one["type"] for one in first["conditions"]}
    assert made["observedGeneration"] == 2
    assert made["pools"] == first["pools"]


METADATA = {"name": "qwen", "namespace": "serving", "uid": "uid-1", "resourceVersion": "7"}


def event_reasons(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["type"], one["reason"]) for one in events(METADATA, before, after, "t")]


FIRST_SPEC = router({**SMALLEST, "pools": SCALED})
CHANGES: dict[str, tuple[Router, StatusInput, list[tuple[str, str]]]] = {
    "nothing": (FIRST_SPEC, AUTOSCALERS["metric available"][0], []),
    "autoscaler": (FIRST_SPEC, AUTOSCALERS["metric missing"][0], [("Warning", "AutoscalerFailed")]),
    "suspension": (router({**SMALLEST, "suspend": True}), HEALTHY, [("Normal", "Suspended")]),
    "rollout": (
        router(SMALLEST),
        CASES["failed rollout"][0],
        [("Warning", "ProgressDeadlineExceeded")],
    ),
}


@pytest.mark.parametrize(("changed", "seen", "wanted"), CHANGES.values(), ids=CHANGES.keys())
def test_event_warns_only_of_failures(
    changed: Router, seen: StatusInput, wanted: list[tuple[str, str]]
) -> None:
    before = build_status(FIRST_SPEC, AUTOSCALERS["metric available"][0], {}, "t1")["conditions"]
    after = build_status(changed, seen, {"conditions": before}, "t2")["conditions"]
    assert event_reasons(before, after) == wanted


def test_event_is_created_for_each_changed_reason() -> None:
    first = build_status(router(SMALLEST), StatusInput(), {}, "t1")["conditions"]
    crashing = CASES["crash-looping pool"][0]
    second = build_status(router(SMALLEST), crashing, {"conditions": first}, "t2")["conditions"]
    assert event_reasons([], first) == [
        ("Normal", "NotCreated"),
        ("Normal", "RollingOut"),
        ("Normal", "Accepted"),
    ]
    assert event_reasons(first, second) == [("Warning", "CrashLooping")]
    assert event_reasons(second, second) == []
