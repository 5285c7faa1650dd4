"""The status of a DPSRouter, and the Events that report changes of its conditions. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dps_engines.pools import POOLS, PoolName
from dps_operator.api import to_wire
from dps_operator.build.network import base_url
from dps_operator.conditions import Condition, StatusInput, conditions, spec_valid
from dps_operator.effective import Router
from dps_operator.objects import MANAGED_BY, ROUTER, Manifest, child_name, digest, selector
from dps_operator.observe import Replicas
from dps_operator.rollout import history


def build_status(router: Router, observed: StatusInput, before: Mapping[str, Any], now: str) -> Manifest:
    """The complete status. before: the previous status. now: the time in RFC 3339."""
    routing = router.spec.routing
    labels = ",".join(f"{key}={value}" for key, value in selector(router, "gateway").items())
    result: Manifest = {
        "observedGeneration": router.generation,
        "conditions": _with_times(conditions(router, observed), before, router.generation, now),
        "url": base_url(router),
        "pools": {pool: _pool_status(router, observed, pool, before, now) for pool in POOLS},
        "gateway": {**_counts(observed.replicas(router, "gateway")), "selector": labels},
    }
    if router.allocation is not None:
        rule = "EqualLoad" if router.load_ratio is None else "Calibrated"
        result["gpuBudget"] = to_wire(router.allocation) | {"rule": rule}
    if router.spec.paused:
        # The spec may differ from what has been applied.
        result |= {field: before[field] for field in ("url", "routing") if field in before}
    elif ("ConfigMap", child_name(router, "gateway")) in observed.children:
        result["routing"] = {"policy": routing.policy}
        if routing.threshold_tokens is not None:
            result["routing"]["thresholdTokens"] = routing.threshold_tokens
        if router.recommended is not None:
            result["routing"]["recommended"] = to_wire(router.recommended)
    return result


def invalid_spec_status(problem: str, before: Mapping[str, Any], generation: int, now: str) -> Manifest:
    """The status for a spec that cannot be parsed: Ready and SpecValid say why; everything else is kept."""
    invalid = spec_valid(problem)
    updated = _with_times([replace(invalid, type="Ready"), invalid], before, generation, now)
    kept = [item for item in before.get("conditions", []) if item["type"] not in ("Ready", "SpecValid")]
    return {**before, "observedGeneration": generation, "conditions": [*updated, *kept]}


def _with_times(
    found: Sequence[Condition], before: Mapping[str, Any], generation: int, now: str
) -> list[dict[str, Any]]:
    """Conditions in the form of metav1.Condition. The transition time changes only if the condition's status does."""
    previous = {condition["type"]: condition for condition in before.get("conditions", [])}
    result = []
    for condition in found:
        old = previous.get(condition.type, {})
        same = old.get("status") == condition.status
        time = old["lastTransitionTime"] if same else now
        result.append({**asdict(condition), "observedGeneration": generation, "lastTransitionTime": time})
    return result


def _counts(replicas: Replicas | None) -> dict[str, Any]:
    existing, ready = (replicas.existing, replicas.ready) if replicas else (0, 0)
    return {"replicas": existing, "readyReplicas": ready}


def _pool_status(
    router: Router, observed: StatusInput, pool: PoolName, before: Mapping[str, Any], now: str
) -> dict[str, Any]:
    """The status of a pool."""
    result = _counts(observed.replicas(router, pool))
    if router.pools[pool].spec.scaling == "External":
        result["scaling"] = "External"
    past = before.get("pools", {}).get(pool, {})
    # While the DPSRouter is paused, no pod templates are compared.
    if past.get("outdated") if router.spec.paused else pool in observed.kept:
        result["outdated"] = True
    engine = observed.children.get(("Deployment", child_name(router, pool)))
    if revisions := history(engine, past.get("revisions", []), router.generation, now):
        result["revisions"] = revisions
    return result


REPORTED_TYPES = ("Ready", "SpecValid", "Progressing", "AutoscalingActive", "RouteAccepted", "Monitored")
EXPECTED_REASONS = ("NotCreated", "Starting", "LoadingModel", "ScaledToZero", "Suspended")
"""Condition reasons that are normal while a DPSRouter starts or is stopped; their events have type Normal."""


def events(
    metadata: Manifest, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], now: str
) -> list[Manifest]:
    """Events for conditions that changed. now: the time in RFC 3339."""
    previous = {condition["type"]: condition for condition in before}
    return [
        _event(metadata, condition, now)
        for condition in after
        if condition["type"] in REPORTED_TYPES
        and any(
            previous.get(condition["type"], {}).get(part) != condition[part] for part in ("status", "reason")
        )
    ]


def _event(metadata: Manifest, condition: Mapping[str, Any], now: str) -> Manifest:
    """The Event for a condition.

    Its name is derived from its content and the transition time, so that neither a restarted operator nor a second
    one creates it twice.
    """
    problem = condition["status"] == "False" and condition["reason"] not in EXPECTED_REASONS
    if condition["type"] == "Progressing":
        problem = condition["reason"] == "ProgressDeadlineExceeded"
    content = {key: condition[key] for key in ("type", "status", "reason", "observedGeneration")}
    identity = digest([metadata["uid"], content, condition["lastTransitionTime"]])
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{identity}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": ROUTER.api_version,
            "kind": ROUTER.name,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "reason": condition["reason"],
        "message": condition["message"][:1024],
        "type": "Warning" if problem else "Normal",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": MANAGED_BY},
        "reportingComponent": MANAGED_BY,
        "reportingInstance": MANAGED_BY,
    }
