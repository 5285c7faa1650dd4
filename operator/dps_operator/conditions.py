"""The status of a DPSRouter: a function of what was asked for and what was seen. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dps_engines.pools import POOLS
from dps_operator.api.status import ConditionType
from dps_operator.builders.network import base_url
from dps_operator.builders.store import managed
from dps_operator.diagnose import most_severe
from dps_operator.observe import Child, ChildKey, Pod, Replicas
from dps_operator.resources import Component, Manifest, Router, child_name, selector


@dataclass(frozen=True)
class Verdict:
    """A condition before it has a time."""

    type: ConditionType
    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class Observed:
    """Everything that a status is made from."""

    children: Mapping[ChildKey, Child] = field(default_factory=dict)
    pods: Sequence[Pod] = ()
    invalid: str = ""
    """Why the spec cannot be carried out; empty where it can."""
    failing: str = ""
    """What the API server last answered where a call failed for now; empty where none did."""
    waiting_pool: str | None = None
    """The pool whose change waits for the other's rollout."""


NOUNS: dict[Component, str] = {
    "speculative": "speculative pool",
    "greedy": "greedy pool",
    "gateway": "gateway",
    "redis": "session store",
}


def _workload(seen: Observed, kind: str, name: str) -> Replicas | None:
    child = seen.children.get((kind, name))
    return child.replicas if child else None


def _serving(router_name: str, seen: Observed, component: Component, type: ConditionType) -> Verdict:
    """Whether one component can serve: at least one of its replicas is ready."""
    kind = "StatefulSet" if component == "redis" else "Deployment"
    replicas = _workload(seen, kind, f"{router_name}-{component}")
    if replicas is None:
        return Verdict(type, "False", "NotCreated", f"the {NOUNS[component]} has not been created yet")
    problem = most_severe([pod.problem for pod in seen.pods if pod.component == component and pod.problem])
    count = f"{replicas.ready} of {replicas.wanted} replicas are ready"
    if replicas.ready >= replicas.wanted:
        return Verdict(type, "True", "AllReplicasReady", count)
    if replicas.ready > 0:
        return Verdict(type, "True", "SomeReplicasReady", f"{count}; {problem.message}" if problem else count)
    if problem:
        return Verdict(type, "False", problem.reason, problem.message)
    if replicas.failure:
        return Verdict(type, "False", "PodsForbidden", f"pods cannot be created: {replicas.failure}")
    return Verdict(type, "False", "Starting", count)


def _store(router: Router, seen: Observed) -> Verdict:
    reference = router.spec.session_store.url_secret_ref
    if reference is None:
        return _serving(router.name, seen, "redis", "SessionStoreReady")
    message = f"the gateways use the Redis of Secret {reference.name}; dps_state_degraded tells how it does"
    return Verdict("SessionStoreReady", "True", "External", message)


def _progressing(router: Router, seen: Observed) -> Verdict:
    if seen.failing:
        return Verdict("Progressing", "True", "Retrying", seen.failing)
    if seen.waiting_pool:
        (other,) = (pool for pool in POOLS if pool != seen.waiting_pool)
        message = f"the {seen.waiting_pool} pool changes when the {other} pool has finished changing"
        return Verdict("Progressing", "True", "RollingOut", message)
    components: list[Component] = [*POOLS, "gateway"]
    if managed(router) is not None:
        components.append("redis")
    for component in components:
        kind = "StatefulSet" if component == "redis" else "Deployment"
        replicas = _workload(seen, kind, child_name(router, component))
        if replicas is None or not replicas.settled:
            return Verdict("Progressing", "True", "RollingOut", f"the {NOUNS[component]} is not settled yet")
    return Verdict("Progressing", "False", "Settled", "every replica is ready and of the newest spec")


def _summary(parts: Sequence[Verdict]) -> Verdict:
    for part in parts:
        if part.status != "True":
            return Verdict("Ready", "False", part.reason, part.message)
    return Verdict("Ready", "True", "Serving", "requests are served by both pools")


def verdicts(router: Router, seen: Observed) -> list[Verdict]:
    """All conditions of a DPSRouter whose spec could be read; Ready first."""
    if seen.invalid:
        message = f"{seen.invalid}; what ran before keeps running"
        valid = Verdict("SpecValid", "False", "InvalidSpec", message)
    else:
        valid = Verdict("SpecValid", "True", "Accepted", "the spec can be carried out")
    parts = [
        valid,
        _serving(router.name, seen, "speculative", "SpeculativePoolReady"),
        _serving(router.name, seen, "greedy", "GreedyPoolReady"),
        _store(router, seen),
        _serving(router.name, seen, "gateway", "GatewayReady"),
    ]
    return [_summary(parts), _progressing(router, seen), *parts]


def conditions(
    found: Sequence[Verdict], before: Sequence[Mapping[str, Any]], generation: int, now: str
) -> list[dict[str, Any]]:
    """Conditions in Kubernetes' shape; the transition time moves only where the status itself does."""
    known = {one["type"]: one for one in before}
    made = []
    for verdict in found:
        old = known.get(verdict.type, {})
        same = old.get("status") == verdict.status
        made.append(
            {
                "type": verdict.type,
                "status": verdict.status,
                "reason": verdict.reason,
                "message": verdict.message,
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if same else now,
            }
        )
    return made


def _counts(replicas: Replicas | None) -> dict[str, int]:
    existing, ready = (replicas.existing, replicas.ready) if replicas else (0, 0)
    return {"replicas": existing, "readyReplicas": ready}


def build_status(router: Router, seen: Observed, before: Mapping[str, Any], now: str) -> Manifest:
    """The whole status. `before` is the status so far, `now` the time as RFC 3339."""
    counts = {
        component: _counts(_workload(seen, "Deployment", child_name(router, component)))
        for component in (*POOLS, "gateway")
    }
    routing = router.spec.routing
    labels = ",".join(f"{key}={value}" for key, value in selector(router, "gateway").items())
    made: Manifest = {
        "observedGeneration": router.generation,
        "conditions": conditions(
            verdicts(router, seen), before.get("conditions", []), router.generation, now
        ),
        "url": base_url(router),
        "pools": {pool: counts[pool] for pool in POOLS},
        "gateway": {**counts["gateway"], "selector": labels},
    }
    if ("ConfigMap", child_name(router, "gateway")) in seen.children:
        made["routing"] = {"policy": routing.policy}
        if routing.threshold_tokens is not None:
            made["routing"]["thresholdTokens"] = routing.threshold_tokens
    return made


def invalid_spec_status(message: str, before: Mapping[str, Any], generation: int, now: str) -> Manifest:
    """The status where the spec could not even be read: what was known stays, and two conditions tell why."""
    said = f"{message}; what ran before keeps running"
    found = [
        Verdict("Ready", "False", "InvalidSpec", said),
        Verdict("SpecValid", "False", "InvalidSpec", said),
    ]
    made = conditions(found, before.get("conditions", []), generation, now)
    kept = [one for one in before.get("conditions", []) if one["type"] not in ("Ready", "SpecValid")]
    return {**before, "observedGeneration": generation, "conditions": [*made, *kept]}
