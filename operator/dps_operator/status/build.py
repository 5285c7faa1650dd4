"""Builds the status of a DPSRouter, in the form in which it is written to the API server."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dps_engines.pools import POOLS, PoolName
from dps_operator.api.types import to_wire
from dps_operator.builders.network import base_url
from dps_operator.builders.pool_engines import pool_of
from dps_operator.observe import Replicas
from dps_operator.resources import Manifest, Router, child_name, engine_key, selector
from dps_operator.revisions import history
from dps_operator.status.condition import Condition
from dps_operator.status.conditions import conditions, spec_valid
from dps_operator.status.observed import Observed


def build_status(router: Router, observed: Observed, before: Mapping[str, Any], now: str) -> Manifest:
    """The complete status. before: the previous status. now: the time in RFC 3339."""
    routing = router.spec.routing
    labels = ",".join(f"{key}={value}" for key, value in selector(router, "gateway").items())
    result: Manifest = {
        "observedGeneration": router.generation,
        "conditions": _with_times(conditions(router, observed), before, router.generation, now),
        "url": base_url(router),
        "pools": {pool: _pool(router, observed, pool, before, now) for pool in POOLS},
        "gateway": {**_counts(observed.replicas(router, "gateway")), "selector": labels},
    }
    if observed.allocation is not None:
        rule = "EqualLoad" if observed.load_ratio is None else "Calibrated"
        result["gpuBudget"] = {**observed.allocation.to_status(), "rule": rule}
    if router.sizes.read:
        result["models"] = router.sizes.to_status()
    if router.spec.paused:
        # The spec may differ from what has been applied.
        result |= {field: before[field] for field in ("url", "routing") if field in before}
    elif ("ConfigMap", child_name(router, "gateway")) in observed.children:
        result["routing"] = {"policy": routing.policy}
        if routing.threshold_tokens is not None:
            result["routing"]["thresholdTokens"] = routing.threshold_tokens
        if observed.recommended is not None:
            result["routing"]["recommended"] = to_wire(observed.recommended)
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
        result.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if same else now,
            }
        )
    return result


def _counts(replicas: Replicas | None) -> dict[str, Any]:
    existing, ready = (replicas.existing, replicas.ready) if replicas else (0, 0)
    return {"replicas": existing, "readyReplicas": ready}


def _pool(
    router: Router, observed: Observed, pool: PoolName, before: Mapping[str, Any], now: str
) -> dict[str, Any]:
    """The status of a pool."""
    result = _counts(observed.replicas(router, pool))
    if pool_of(router.spec, pool).scaling == "External":
        result["scaling"] = "External"
    past = before.get("pools", {}).get(pool, {})
    # While the DPSRouter is paused, no pod templates are compared.
    if past.get("outdated") if router.spec.paused else pool in observed.kept:
        result["outdated"] = True
    engine = observed.children.get(engine_key(router.name, pool))
    if revisions := history(engine, past.get("revisions", []), router.generation, now):
        result["revisions"] = revisions
    return result
