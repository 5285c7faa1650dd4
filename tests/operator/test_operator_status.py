"""The conditions, the rest of the status, and Events for changes."""

from dataclasses import replace
from typing import Any

import pytest

from dps_engines.pools import POOLS
from dps_operator.api.status import ConditionType
from dps_operator.gpu_budget.allocation import Allocation
from dps_operator.observe import Child, Finished, child
from dps_operator.prefix_cache.engines import EngineReports
from dps_operator.prefix_cache.health import CacheHealth
from dps_operator.status.build import build_status, invalid_spec_status
from dps_operator.status.conditions import conditions
from dps_operator.status.diagnose import Problem
from dps_operator.status.events import events
from dps_operator.status.observed import Observed
from dps_testkit.operator.objects import observed_pod, replicas, workload
from dps_testkit.operator.routers import PREFIX_CACHE, SMALLEST, router, smallest

CRASH = Problem("CrashLooping", "pod qwen-speculative-1 ended with exit code 1: no memory")


def family(**changed: Child) -> dict[tuple[str, str], Child]:
    """Children that are all ready, except for the changed ones."""
    made = {name: workload(name, replicas(2, 2) if name == "gateway" else replicas()) for name in COMPONENTS}
    made["redis"] = replace(made["redis"], kind="StatefulSet")
    made |= changed
    config = replace(made["gateway"], kind="ConfigMap", replicas=None)
    return {(one.kind, one.name): one for one in (*made.values(), config)}


COMPONENTS = ("speculative", "greedy", "gateway", "redis")
HEALTHY = Observed(children=family())


def condition_reasons(seen: Observed, **spec: Any) -> dict[str, tuple[str, str]]:
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


def test_ready_does_not_depend_on_prefix_cache_shared() -> None:
    spec = {name: value for name, value in PREFIX_CACHE.items() if name not in SMALLEST}
    assert condition_reasons(HEALTHY, **spec)["PrefixCacheShared"] == ("Unknown", "NotReported")
    health = CacheHealth(reports=EngineReports(reporting=frozenset(POOLS)))
    sharing = replace(HEALTHY, cache_health=health)
    assert condition_reasons(sharing, **spec)["PrefixCacheShared"] == ("True", "BothWays")
    old = condition_reasons(HEALTHY, **spec | {"engine": {"version": "0.5.8"}})
    assert old["PrefixCacheShared"] == ("False", "VersionNotSupported")
    assert old["Ready"] == ("True", "Serving")


@pytest.mark.parametrize(
    ("service", "expected"),
    [
        (None, ("Unknown", "NotMeasured")),
        (CacheHealth(), ("Unknown", "NotMeasured")),
        (CacheHealth(judged=frozenset({"greedy"})), ("True", "StorageServing")),
        (
            CacheHealth(judged=frozenset({"greedy", "speculative"}), unserved=frozenset({"greedy"})),
            ("False", "StorageNotServing"),
        ),
        (
            CacheHealth("no gateway is ready", judged=frozenset({"greedy"})),
            ("Unknown", "GatewaysUnreachable"),
        ),
    ],
    ids=["nothing observed", "too few tokens", "served", "one pool is not served", "no gateway answers"],
)
def test_ready_does_not_depend_on_prefix_cache_serving(
    service: CacheHealth | None, expected: tuple[str, str]
) -> None:
    found = {
        one.type: one for one in conditions(router(PREFIX_CACHE), replace(HEALTHY, cache_health=service))
    }
    one = found["PrefixCacheServing"]
    assert (one.status, one.reason) == expected
    assert found["Ready"].status == "True"
    assert "greedy pool" in one.message or expected[1] != "StorageNotServing"


def test_prefix_cache_that_is_not_shared_is_reported_with_what_to_change() -> None:
    eagle = {"speculation": {"algorithm": "Eagle", "draftModel": "m"}}
    found = conditions(router({**PREFIX_CACHE, "pools": {"speculative": eagle}}), HEALTHY)
    assert found[-1].message == (
        "each engine has its own prefix cache: Eagle engines share KV with no other engine; set "
        "spec.pools.speculative.speculation.algorithm to Standalone or Ngram, or spec.prefixCache.mode to Separate"
    )


CASES: dict[str, tuple[Observed, dict[str, tuple[str, str]]]] = {
    "no children yet": (
        Observed(),
        {
            "Ready": ("False", "NotCreated"),
            "Progressing": ("True", "RollingOut"),
            "GatewayReady": ("False", "NotCreated"),
        },
    ),
    "crash-looping pool": (
        Observed(
            family(speculative=workload("speculative", replicas(0))), [observed_pod("speculative", CRASH)]
        ),
        {
            "Ready": ("False", "CrashLooping"),
            "SpeculativePoolReady": ("False", "CrashLooping"),
            "GreedyPoolReady": ("True", "AllReplicasReady"),
        },
    ),
    "one of three replicas ready": (
        Observed(
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
        Observed(family(greedy=workload("greedy", replicas(0, failure="exceeded quota")))),
        {"Ready": ("False", "PodsForbidden"), "GreedyPoolReady": ("False", "PodsForbidden")},
    ),
    "replica of the old template": (
        Observed(family(greedy=workload("greedy", replicas(1, settled=False)))),
        {"Ready": ("True", "Serving"), "Progressing": ("True", "RollingOut")},
    ),
    "failed rollout": (
        Observed(
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
    "missing ServiceMonitor": (
        replace(HEALTHY, unmonitored="ServiceMonitor is not installed in this cluster"),
        {"Ready": ("True", "Serving"), "SpecValid": ("True", "Accepted")},
    ),
    "API server failure": (
        replace(HEALTHY, failing="etcdserver: request timed out"),
        {"Ready": ("True", "Serving"), "Progressing": ("True", "Retrying")},
    ),
    "pool scaled to zero": (
        Observed(family(greedy=workload("greedy", replicas(0, 0)))),
        {
            "Ready": ("False", "ScaledToZero"),
            "GreedyPoolReady": ("False", "ScaledToZero"),
            "Progressing": ("False", "Settled"),
        },
    ),
    "pool on hold": (
        replace(HEALTHY, waiting_pool="greedy"),
        {"Ready": ("True", "Serving"), "Progressing": ("True", "RollingOut")},
    ),
}


@pytest.mark.parametrize(("seen", "wanted"), CASES.values(), ids=CASES.keys())
def test_conditions_follow_from_observations(seen: Observed, wanted: dict[str, tuple[str, str]]) -> None:
    found = condition_reasons(seen)
    assert {kind: found[kind] for kind in wanted} == wanted


SCALED = {"greedy": {"autoscaling": {"maxReplicas": 4}}, **SMALLEST["pools"]}
SCALED_TO_ZERO = {"greedy": {"autoscaling": {"minReplicas": 0, "maxReplicas": 1}}, **SMALLEST["pools"]}
NO_METRIC = "unable to get metric dps_demand: no metrics returned from custom metrics API"


def autoscaler(conditions: list[dict[str, str]]) -> Observed:
    """Healthy children with the autoscaler of the greedy pool."""
    found = child(
        {
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "qwen-greedy"},
            "status": {"conditions": conditions},
        }
    )
    return Observed(children=family() | {(found.kind, found.name): found})


AUTOSCALERS: dict[str, tuple[Observed, tuple[str, str]]] = {
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
def test_autoscaler_without_its_metric_is_reported(seen: Observed, wanted: tuple[str, str]) -> None:
    found = condition_reasons(seen, pools=SCALED)
    assert (found["AutoscalingActive"], found["Ready"]) == (wanted, ("True", "Serving"))


def routed(*parents: list[dict[str, Any]]) -> Observed:
    """Healthy children with an HTTPRoute with two parents and the third generation. parents: the conditions of each."""
    found = child(
        {
            "kind": "HTTPRoute",
            "metadata": {"name": "qwen-gateway", "generation": 3},
            "spec": {"parentRefs": [{"name": "public"}, {"name": "internal"}]},
            "status": {"parents": [{"conditions": conditions} for conditions in parents]},
        }
    )
    return Observed(children=family() | {(found.kind, found.name): found})


def route_condition(type: str, status: str, generation: int = 3) -> dict[str, Any]:
    """A condition that the controller of a Gateway has written."""
    return {"type": type, "status": status, "reason": "R", "message": "m", "observedGeneration": generation}


ACCEPTED = [route_condition("Accepted", "True"), route_condition("ResolvedRefs", "True")]
ROUTES: dict[str, tuple[Observed, tuple[str, str]]] = {
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
def test_route_that_a_gateway_does_not_serve_is_reported(seen: Observed, wanted: tuple[str, str]) -> None:
    parents = [{"name": "public"}, {"name": "internal"}]
    found = condition_reasons(seen, gateway={"httpRoute": {"parentRefs": parents}})
    assert (found["RouteAccepted"], found["Ready"]) == (wanted, ("True", "Serving"))


def test_message_of_ready_names_what_does_not_work() -> None:
    seen = replace(AUTOSCALERS["metric missing"][0], unmonitored="ServiceMonitor is not installed")
    spec = {**SMALLEST, "pools": SCALED, "telemetry": {"serviceMonitor": {}}}
    found = {item.type: item for item in conditions(router(spec), seen)}
    assert found["Monitored"].reason == "CRDNotInstalled"
    assert found["Ready"].message == (
        "requests are served by both pools; the autoscaler of the greedy pool does not work: "
        f"{NO_METRIC}; ServiceMonitor is not installed"
    )


def test_message_of_ready_names_optional_features_that_do_not_work() -> None:
    ended = replace(observed_pod("calibration"), finished=Finished(1, "no turns", "2026-01-01T03:00:10Z"))
    seen = replace(HEALTHY, allocation=Allocation(1, 1), unmeasured="no gateway is ready", pods=[ended])
    spec = {
        **PREFIX_CACHE,
        "engine": {"version": "0.5.8"},
        "gpuBudget": {"gpus": 2},
        "routing": {"calibration": {}},
    }
    found = {item.type: item for item in conditions(router(spec), seen)}
    features = [found[name] for name in ("PrefixCacheShared", "DemandMeasured", "RoutingCalibrated")]
    assert [feature.status for feature in features] == ["False"] * 3
    assert found["Ready"].status == "True"
    assert found["Ready"].message == "; ".join(
        ["requests are served by both pools", *(feature.message for feature in features)]
    )


def test_autoscaler_that_does_not_work_causes_a_warning() -> None:
    spec = router({**SMALLEST, "pools": SCALED})
    before = build_status(spec, AUTOSCALERS["metric available"][0], {}, "t1")["conditions"]
    failed = AUTOSCALERS["metric missing"][0]
    after = build_status(spec, failed, {"conditions": before}, "t2")["conditions"]
    assert event_reasons(before, after) == [("Warning", "AutoscalerFailed")]


def test_failed_rollout_is_reported_with_its_cause() -> None:
    cause = "the rollout of the speculative pool has failed: " + CRASH.message
    found = {item.type: item.message for item in conditions(router(SMALLEST), CASES["failed rollout"][0])}
    assert found["Progressing"] == cause
    assert found["Ready"] == f"requests are served by both pools; {cause}"


def test_rollout_is_reported_with_the_problem_of_its_pods() -> None:
    found = {
        item.type: item.message
        for item in conditions(router(SMALLEST), CASES["one of three replicas ready"][0])
    }
    assert found["Progressing"] == f"the speculative pool is rolling out: {CRASH.message}"


def forbidden(**counts: Any) -> Observed:
    """A quota forbids a pod of the speculative pool, of which other pods are ready."""
    refused = replicas(1, failure="exceeded quota", **counts)
    return Observed(family(speculative=workload("speculative", refused)))


QUOTA = "pods cannot be created: exceeded quota"
FORBIDDEN: dict[str, tuple[Observed, ConditionType, str]] = {
    "replicas": (forbidden(desired=2), "SpeculativePoolReady", f"1 of 2 replicas are ready; {QUOTA}"),
    "pods of a rollout": (
        forbidden(settled=False),
        "Progressing",
        f"the speculative pool is rolling out: {QUOTA}",
    ),
    "pods of a rollout for which the other pool waits": (
        replace(forbidden(settled=False), waiting_pool="greedy"),
        "Progressing",
        f"the rollout of the greedy pool starts after that of the speculative pool: {QUOTA}",
    ),
    "pods of a failed rollout": (
        forbidden(settled=False, stalled="ReplicaSet has timed out progressing."),
        "Ready",
        f"requests are served by both pools; the rollout of the speculative pool has failed: {QUOTA}",
    ),
}


@pytest.mark.parametrize(("seen", "condition", "message"), FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_pods_that_are_forbidden_are_reported_although_requests_are_served(
    seen: Observed, condition: ConditionType, message: str
) -> None:
    found = {item.type: item for item in conditions(router(SMALLEST), seen)}
    assert found["Ready"].status == "True"
    assert found[condition].message == message


@pytest.mark.parametrize("scaled", [{"gpuBudget": {"gpus": 2}}, {"pools": SCALED_TO_ZERO}])
def test_demand_of_a_suspended_router_is_no_condition(scaled: dict[str, Any]) -> None:
    seen = replace(HEALTHY, allocation=Allocation(1, 1) if "gpuBudget" in scaled else None)
    for suspend in (False, True):
        found = conditions(router({**SMALLEST, **scaled, "suspend": suspend}), seen)
        assert ("DemandMeasured" in {item.type for item in found}) is not suspend


def test_suspended_router_is_not_ready() -> None:
    stopped = {pool: workload(pool, replicas(0, 0)) for pool in ("speculative", "greedy")}
    assert condition_reasons(Observed(family(**stopped)), suspend=True) == {
        "Ready": ("False", "Suspended"),
        "Progressing": ("False", "Settled"),
        "SpecValid": ("True", "Accepted"),
        "SpeculativePoolReady": ("False", "Suspended"),
        "GreedyPoolReady": ("False", "Suspended"),
        "SessionStoreReady": ("True", "AllReplicasReady"),
        "GatewayReady": ("True", "AllReplicasReady"),
    }


def test_pause_is_reported_without_affecting_readiness() -> None:
    found = condition_reasons(HEALTHY, paused=True)
    assert (found["Ready"], found["Progressing"]) == (("True", "Serving"), ("False", "Paused"))


def test_suspension_is_not_a_warning() -> None:
    before = build_status(router(SMALLEST), HEALTHY, {}, "t1")["conditions"]
    stopped = router({**SMALLEST, "suspend": True})
    after = build_status(stopped, HEALTHY, {"conditions": before}, "t2")["conditions"]
    assert event_reasons(before, after) == [("Normal", "Suspended")]


def test_pool_on_hold_is_reported_with_the_problem_of_the_other_pool() -> None:
    seen = replace(HEALTHY, waiting_pool="greedy", pods=[observed_pod("speculative", CRASH)])
    found = {item.type: item.message for item in conditions(router(SMALLEST), seen)}
    assert found["Progressing"] == (
        f"the rollout of the greedy pool starts after that of the speculative pool: {CRASH.message}"
    )


def test_external_scaling_is_shown_in_the_status() -> None:
    made = build_status(smallest(greedy={"scaling": "External"}), HEALTHY, {}, "t1")
    assert made["pools"] == {
        "speculative": {"replicas": 1, "readyReplicas": 1},
        "greedy": {"replicas": 1, "readyReplicas": 1, "scaling": "External"},
    }


def test_failed_rollout_causes_a_warning() -> None:
    before = build_status(router(SMALLEST), HEALTHY, {}, "t1")["conditions"]
    failed = CASES["failed rollout"][0]
    after = build_status(router(SMALLEST), failed, {"conditions": before}, "t2")["conditions"]
    assert event_reasons(before, after) == [("Warning", "ProgressDeadlineExceeded")]


def test_external_redis_does_not_block_readiness() -> None:
    store = {"urlSecretRef": {"name": "redis", "key": "url"}}
    assert condition_reasons(Observed(children=family()), sessionStore=store)["SessionStoreReady"] == (
        "True",
        "External",
    )


def test_status_has_conditions_replicas_and_routing() -> None:
    made = build_status(router(SMALLEST), HEALTHY, {}, "2026-01-01T00:00:00Z")
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
            "greedy": {"replicas": 1, "readyReplicas": 1},
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
    first = build_status(router(SMALLEST), Observed(), {}, "t1")
    second = build_status(router(SMALLEST), Observed(invalid="x"), first, "t2")
    third = build_status(router(SMALLEST), HEALTHY, second, "t3")
    times = [made["conditions"][0]["lastTransitionTime"] for made in (first, second, third)]
    assert times == ["t1", "t1", "t3"]


def test_equal_observations_give_an_equal_status() -> None:
    first = build_status(router(SMALLEST), HEALTHY, {}, "t1")
    assert build_status(router(SMALLEST), HEALTHY, first, "t2") == first


def test_unparsable_spec_keeps_the_rest_of_the_status() -> None:
    first = build_status(router(SMALLEST), HEALTHY, {}, "t1")
    made = invalid_spec_status("spec.pools: missing", first, 2, "t2")
    assert [one["type"] for one in made["conditions"]] == [
        "Ready",
        "SpecValid",
        "Progressing",
        "SpeculativePoolReady",
        "GreedyPoolReady",
        "SessionStoreReady",
        "GatewayReady",
    ]
    assert made["observedGeneration"] == 2
    assert made["pools"] == first["pools"]


METADATA = {"name": "qwen", "namespace": "serving", "uid": "uid-1", "resourceVersion": "7"}


def event_reasons(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(one["type"], one["reason"]) for one in events(METADATA, before, after, "t")]


def test_event_is_created_for_each_changed_reason() -> None:
    first = build_status(router(SMALLEST), Observed(), {}, "t1")["conditions"]
    crashing = CASES["crash-looping pool"][0]
    second = build_status(router(SMALLEST), crashing, {"conditions": first}, "t2")["conditions"]
    assert event_reasons([], first) == [
        ("Normal", "NotCreated"),
        ("Normal", "RollingOut"),
        ("Normal", "Accepted"),
    ]
    assert event_reasons(first, second) == [("Warning", "CrashLooping")]
    assert event_reasons(second, second) == []


def test_event_name_is_deterministic() -> None:
    after = build_status(router(SMALLEST), HEALTHY, {}, "t1")["conditions"]
    names = [[one["metadata"]["name"] for one in events(METADATA, [], after, now)] for now in ("a", "b")]
    assert names[0] == names[1]
    assert len(set(names[0])) == 3
