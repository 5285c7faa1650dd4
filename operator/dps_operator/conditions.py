"""Builds the status of a DPSRouter from its spec and its observed children. This module performs no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dps_engines.pools import POOLS, PoolName
from dps_operator.api.status import ConditionType, RecommendedRouting
from dps_operator.api.types import to_wire
from dps_operator.builders.mooncake import managed_master
from dps_operator.builders.network import base_url
from dps_operator.builders.prefix_cache import common, unshareable
from dps_operator.builders.runtime import pool_of
from dps_operator.builders.scaling import has_autoscaler
from dps_operator.builders.store import managed
from dps_operator.calibration import ResultError, newest, read
from dps_operator.diagnose import Problem, last_line, most_severe
from dps_operator.gpu_budget.allocation import Allocation
from dps_operator.observe import Child, ChildKey, Pod, Replicas
from dps_operator.prefix_cache.condition import cache_serving, master_not_ready
from dps_operator.prefix_cache.service import CacheService
from dps_operator.resources import Component, Manifest, Router, child_name, selector
from dps_operator.revisions import described, history
from dps_operator.scale_to_zero.rules import pools_with_zero, serving
from dps_operator.verdict import Verdict


@dataclass(frozen=True)
class Observed:
    """Inputs of the status."""

    children: Mapping[ChildKey, Child] = field(default_factory=dict)
    pods: Sequence[Pod] = ()
    invalid: str = ""
    """Why the spec cannot be applied; empty if it can."""
    unmonitored: str = ""
    """Why the ServiceMonitor cannot be applied, which does not affect serving; empty if it can."""
    failing: str = ""
    """Message of a failed API server call; empty if all calls succeeded."""
    waiting_pool: str | None = None
    """The pool whose rollout waits for the other pool's."""
    kept: Sequence[PoolName] = ()
    """The pools that keep the pod template of another operator release."""
    allocation: Allocation | None = None
    """How the pools share the GPU budget; None without one."""
    recommended: RecommendedRouting | None = None
    """The result of the last calibration that has found one; None without calibrations."""
    unmeasured: str | None = None
    """Why the demand of the pools is unknown; empty if it is known, None if it has not been measured yet."""
    asleep: Sequence[PoolName] = ()
    """The idle pools that are scaled to zero until requests arrive for them."""
    cache_service: CacheService | None = None
    """Whether the pools fetch from the common prefix cache; None if nothing has been observed."""


NOUNS: dict[Component, str] = {
    "speculative": "speculative pool",
    "greedy": "greedy pool",
    "gateway": "gateway",
    "redis": "session store",
    "mooncake": "Mooncake master",
}


def _workload(observed: Observed, kind: str, name: str) -> Replicas | None:
    child = observed.children.get((kind, name))
    return child.replicas if child else None


def _serving(router: Router, observed: Observed, component: Component, type: ConditionType) -> Verdict:
    """Whether a component can serve, which requires one available replica."""
    kind = "StatefulSet" if component == "redis" else "Deployment"
    replicas = _workload(observed, kind, child_name(router, component))
    suspended = router.spec.suspend and not router.spec.paused and component in POOLS
    if replicas is None:
        return Verdict(type, "False", "NotCreated", f"the {NOUNS[component]} has not been created yet")
    if suspended:
        message = "spec.suspend is true: the engines are stopped, and requests are answered with 503"
        return Verdict(type, "False", "Suspended", message)
    if replicas.desired == 0 and router.spec.placement == "SharedGPU":
        message = "the engine starts when that of the greedy pool is ready, because both share a GPU"
        return Verdict(type, "False", "Starting", message)
    if component in observed.asleep:
        message = f"the {NOUNS[component]} is idle; it starts when requests arrive for it"
        return Verdict(type, "False", "ScaledToZero", message)
    if replicas.desired == 0:
        message = f"the {NOUNS[component]} has been scaled to 0 replicas; scale it up to serve requests"
        return Verdict(type, "False", "ScaledToZero", message)
    problem = _problem(observed, component)
    count = f"{replicas.ready} of {replicas.desired} replicas are ready"
    if replicas.ready >= replicas.desired:
        return Verdict(type, "True", "AllReplicasReady", count)
    if replicas.ready > 0:
        return Verdict(type, "True", "SomeReplicasReady", f"{count}; {problem.message}" if problem else count)
    if problem:
        return Verdict(type, "False", problem.reason, problem.message)
    if replicas.failure:
        return Verdict(type, "False", "PodsForbidden", f"pods cannot be created: {replicas.failure}")
    return Verdict(type, "False", "Starting", count)


def _store(router: Router, observed: Observed) -> Verdict:
    reference = router.spec.session_store.url_secret_ref
    if reference is None:
        return _serving(router, observed, "redis", "SessionStoreReady")
    message = (
        f"the gateways use the Redis of Secret {reference.name}; see metric dps_state_degraded for its health"
    )
    return Verdict("SessionStoreReady", "True", "External", message)


def _autoscaling(router: Router, observed: Observed) -> list[Verdict]:
    """Whether the autoscalers work; empty if there are none. Without its metric, an autoscaler changes nothing."""
    components: list[Component] = [name for name in POOLS if has_autoscaler(pool_of(router.spec, name))]
    if router.spec.gateway.autoscaling is not None:
        components.append("gateway")
    if not components or router.spec.suspend:
        return []
    found = {
        name: observed.children.get(("HorizontalPodAutoscaler", child_name(router, name)))
        for name in components
    }
    failures = [
        f"the autoscaler of the {NOUNS[name]} does not work: {one.scaling.failure}"
        for name, one in found.items()
        if one is not None and one.scaling is not None and one.scaling.failure
    ]
    if failures:
        return [Verdict("AutoscalingActive", "False", "AutoscalerFailed", "; ".join(failures))]
    if any(one is None or one.scaling is None for one in found.values()):
        return [Verdict("AutoscalingActive", "Unknown", "NotEvaluated", "an autoscaler has not run yet")]
    return [Verdict("AutoscalingActive", "True", "AutoscalersActive", "all autoscalers read their metrics")]


def _monitored(router: Router, observed: Observed) -> list[Verdict]:
    """Whether the ServiceMonitor exists; empty if the spec has none."""
    if router.spec.telemetry.service_monitor is None:
        return []
    if observed.unmonitored:
        return [Verdict("Monitored", "False", "CRDNotInstalled", observed.unmonitored)]
    if ("ServiceMonitor", child_name(router, "metrics")) not in observed.children:
        return [Verdict("Monitored", "Unknown", "NotCreated", "the ServiceMonitor has not been created yet")]
    return [Verdict("Monitored", "True", "ServiceMonitorCreated", "the ServiceMonitor has been created")]


def _prefix_cache(router: Router, observed: Observed) -> list[Verdict]:
    """Whether the pools can read each other's pages, and do; empty if each engine has its own prefix cache.

    Ready does not depend on them, because engines that share no pages serve requests as well.
    """
    if common(router.spec) is None:
        return []
    if found := unshareable(router.spec):
        message = f"each engine has its own prefix cache: {found.message}"
        return [Verdict("PrefixCacheShared", "False", found.reason, message)]
    message = "the engines of both pools can read each other's pages"
    shared = Verdict("PrefixCacheShared", "True", "BothWays", message)
    if managed_master(router) is not None:
        master = _workload(observed, "Deployment", child_name(router, "mooncake"))
        if master is None or master.ready == 0:
            return [shared, master_not_ready(_problem(observed, "mooncake"))]
    return [shared, cache_serving(observed.cache_service)]


def _demand(router: Router, observed: Observed) -> list[Verdict]:
    """Whether the demand of the pools is known; empty if they are not scaled by it. Ready does not depend on it."""
    moves = observed.allocation is not None
    if not moves and not pools_with_zero(router.spec):
        return []
    effect = "replicas move between the pools" if moves else "pools are scaled to and from zero"
    if observed.unmeasured is None:
        return [Verdict("DemandMeasured", "Unknown", "NotMeasured", "the demand has not been measured yet")]
    if observed.unmeasured:
        message = f"no {effect}, because their demand is unknown: {observed.unmeasured}"
        return [Verdict("DemandMeasured", "False", "GatewaysUnreachable", message)]
    return [Verdict("DemandMeasured", "True", "Measured", f"{effect} by their demand")]


def _calibrated(router: Router, observed: Observed) -> list[Verdict]:
    """Whether the last calibration has found a result; empty without calibrations. Ready does not depend on it."""
    calibration = router.spec.routing.calibration
    if calibration is None:
        return []
    last, result = newest(observed.pods), observed.recommended
    if last is not None and last.exit_code != 0:
        message = f"the last calibration failed: {last_line(last.message)}"
        return [Verdict("RoutingCalibrated", "False", "CalibrationFailed", message)]
    if last is not None:
        try:
            read(last)
        except ResultError as error:
            message = (
                f"the result of the last calibration cannot be read: {error}; check that labImage in the chart's "
                "values has the version of the operator"
            )
            return [Verdict("RoutingCalibrated", "False", "CalibrationFailed", message)]
    waiting = [pod.problem for pod in observed.pods if pod.component == "calibration" and not pod.finished]
    problem = most_severe([each for each in waiting if each is not None and each.reason != "Starting"])
    if problem is not None:
        return [Verdict("RoutingCalibrated", "False", problem.reason, problem.message)]
    if result is None:
        message = (
            f"no calibration has finished yet; the schedule is '{calibration.schedule}', in UTC, and kubectl create job"
            f" --from=cronjob/{child_name(router, 'calibration')} NAME starts one now"
        )
        return [Verdict("RoutingCalibrated", "Unknown", "NotCalibrated", message)]
    if calibration.apply:
        return [Verdict("RoutingCalibrated", "True", "Applied", result.verdict)]
    return [Verdict("RoutingCalibrated", "True", "Recommended", result.verdict)]


def _problem(observed: Observed, component: Component) -> Problem | None:
    """The most severe problem of a component's pods."""
    return most_severe([pod.problem for pod in observed.pods if pod.component == component and pod.problem])


def _stalled(router: Router, observed: Observed) -> str:
    """The rollouts that have exceeded their progress deadline, and why; empty if there are none."""
    messages = []
    for component in (*POOLS, "gateway"):
        replicas = _workload(observed, "Deployment", child_name(router, component))
        if replicas is not None and replicas.stalled:
            problem = _problem(observed, component)
            cause = problem.message if problem else replicas.stalled
            messages.append(f"the rollout of the {NOUNS[component]} has failed: {cause}")
    return "; ".join(messages)


def _progressing(router: Router, observed: Observed) -> Verdict:
    if router.spec.paused:
        message = "spec.paused is true: changes are not applied; set it to false to apply them"
        return Verdict("Progressing", "False", "Paused", message)
    if observed.failing:
        return Verdict("Progressing", "True", "Retrying", observed.failing)
    if stalled := _stalled(router, observed):
        return Verdict("Progressing", "False", "ProgressDeadlineExceeded", stalled)
    if observed.waiting_pool:
        (other,) = (pool for pool in POOLS if pool != observed.waiting_pool)
        message = f"the rollout of the {observed.waiting_pool} pool starts after that of the {other} pool"
        if cause := _problem(observed, other):
            message = f"{message}: {cause.message}"
        return Verdict("Progressing", "True", "RollingOut", message)
    components: list[Component] = [*POOLS, "gateway"]
    if managed(router) is not None:
        components.append("redis")
    if managed_master(router) is not None:
        components.append("mooncake")
    for component in components:
        kind = "StatefulSet" if component == "redis" else "Deployment"
        replicas = _workload(observed, kind, child_name(router, component))
        if replicas is None or not replicas.settled:
            problem = _problem(observed, component)
            message = f"the {NOUNS[component]} is rolling out"
            return Verdict(
                "Progressing", "True", "RollingOut", f"{message}: {problem.message}" if problem else message
            )
    message = f"all replicas are ready and up to date{described(observed.kept)}"
    return Verdict("Progressing", "False", "Settled", message)


def _summary(parts: Sequence[Verdict], asleep: Sequence[PoolName], warnings: Sequence[str]) -> Verdict:
    """The condition Ready. warnings: what is wrong although requests are served."""
    for part in parts:
        if part.status != "True":
            return Verdict("Ready", "False", part.reason, part.message)
    return Verdict("Ready", "True", "Serving", "; ".join([serving(asleep), *warnings]))


def verdicts(router: Router, observed: Observed) -> list[Verdict]:
    """All conditions of a DPSRouter with a parsable spec; Ready first."""
    if observed.invalid:
        message = f"{observed.invalid}; running workloads are not changed"
        valid = Verdict("SpecValid", "False", "InvalidSpec", message)
    else:
        valid = Verdict("SpecValid", "True", "Accepted", "the spec is valid")
    components = [
        _serving(router, observed, "speculative", "SpeculativePoolReady"),
        _serving(router, observed, "greedy", "GreedyPoolReady"),
        _store(router, observed),
        _serving(router, observed, "gateway", "GatewayReady"),
    ]
    idle = {f"{pool.capitalize()}PoolReady" for pool in observed.asleep}
    required = [valid] if observed.invalid else []
    required += [part for part in components if part.type not in idle]
    impaired = [*_autoscaling(router, observed), *_monitored(router, observed)]
    warnings = [one.message for one in impaired if one.status == "False"]
    summary = _summary(required, observed.asleep, [*filter(None, [_stalled(router, observed)]), *warnings])
    additional = [
        *impaired,
        *_prefix_cache(router, observed),
        *_demand(router, observed),
        *_calibrated(router, observed),
    ]
    return [summary, _progressing(router, observed), valid, *components, *additional]


def conditions(
    found: Sequence[Verdict], before: Sequence[Mapping[str, Any]], generation: int, now: str
) -> list[dict[str, Any]]:
    """Conditions in the form of metav1.Condition. The transition time changes only if the condition's status does."""
    previous = {condition["type"]: condition for condition in before}
    result = []
    for verdict in found:
        old = previous.get(verdict.type, {})
        same = old.get("status") == verdict.status
        result.append(
            {
                "type": verdict.type,
                "status": verdict.status,
                "reason": verdict.reason,
                "message": verdict.message,
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if same else now,
            }
        )
    return result


def _counts(replicas: Replicas | None) -> dict[str, int]:
    existing, ready = (replicas.existing, replicas.ready) if replicas else (0, 0)
    return {"replicas": existing, "readyReplicas": ready}


def _pool_status(
    router: Router, observed: Observed, pool: PoolName, before: Mapping[str, Any], now: str
) -> dict[str, Any]:
    """The status of a pool without its numbers of replicas."""
    result: dict[str, Any] = {}
    if pool_of(router.spec, pool).scaling == "External":
        result["scaling"] = "External"
    if pool in observed.kept:
        result["outdated"] = True
    engine = observed.children.get(("Deployment", child_name(router, pool)))
    past = before.get("pools", {}).get(pool, {}).get("revisions", [])
    if revisions := history(engine, past, router.generation, now):
        result["revisions"] = revisions
    return result


def build_status(router: Router, observed: Observed, before: Mapping[str, Any], now: str) -> Manifest:
    """The complete status. before: the previous status. now: the time in RFC 3339."""
    counts = {
        component: _counts(_workload(observed, "Deployment", child_name(router, component)))
        for component in (*POOLS, "gateway")
    }
    routing = router.spec.routing
    labels = ",".join(f"{key}={value}" for key, value in selector(router, "gateway").items())
    result: Manifest = {
        "observedGeneration": router.generation,
        "conditions": conditions(
            verdicts(router, observed), before.get("conditions", []), router.generation, now
        ),
        "url": base_url(router),
        "pools": {
            pool: {**counts[pool], **_pool_status(router, observed, pool, before, now)} for pool in POOLS
        },
        "gateway": {**counts["gateway"], "selector": labels},
    }
    if observed.allocation is not None:
        result["gpuBudget"] = observed.allocation.to_status()
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


def invalid_spec_status(message: str, before: Mapping[str, Any], generation: int, now: str) -> Manifest:
    """The status for a spec that cannot be parsed: Ready and SpecValid say why; everything else is kept."""
    explanation = f"{message}; running workloads are not changed"
    found = [
        Verdict("Ready", "False", "InvalidSpec", explanation),
        Verdict("SpecValid", "False", "InvalidSpec", explanation),
    ]
    updated = conditions(found, before.get("conditions", []), generation, now)
    kept = [item for item in before.get("conditions", []) if item["type"] not in ("Ready", "SpecValid")]
    return {**before, "observedGeneration": generation, "conditions": [*updated, *kept]}
