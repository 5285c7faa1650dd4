"""The conditions of a DPSRouter, from its effective spec and its observed children. No I/O."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from dps_engines.pools import POOLS, PoolName, other_pool
from dps_operator.api import ConditionType
from dps_operator.build.launch import memory_warning
from dps_operator.diagnose import CacheHealth, Problem, most_severe
from dps_operator.effective import Router
from dps_operator.errors import ClusterError, SpecError
from dps_operator.objects import ChildKey, Component, child_name
from dps_operator.observe import Child, Pod, Replicas


@dataclass(frozen=True)
class Condition:
    """A condition without a transition time."""

    type: ConditionType
    status: str
    reason: str
    message: str


NOUNS: Mapping[Component, str] = {
    "speculative": "speculative pool",
    "greedy": "greedy pool",
    "gateway": "gateway",
    "redis": "session store",
    "mooncake": "Mooncake master",
}
"""The components in messages, in the order in which their rollouts are reported."""


@dataclass
class StatusInput:
    """The children and pods of a DPSRouter, and the results of reconciling it."""

    children: Mapping[ChildKey, Child] = field(default_factory=dict)
    pods: Sequence[Pod] = ()
    invalid: str = ""
    """Why the spec cannot be applied; empty if it can."""
    rejected: list[str] = field(default_factory=list)
    """Why some of the objects cannot be applied, in contrast to the others; empty if all can."""
    unmonitored: str = ""
    """Why the ServiceMonitor cannot be applied, which does not affect serving; empty if it can."""
    failure: ClusterError | None = None
    """The failed API server call, for which the reconcile is retried; None if all calls succeeded."""
    waiting_pool: PoolName | None = None
    """The pool whose rollout waits for the other pool's."""
    kept: Sequence[PoolName] = ()
    """The pools that keep the pod template of another operator release."""
    unmeasured: str | None = None
    """Why the demand of the pools is unknown; empty if it is known, None if it has not been measured yet."""
    cache_health: CacheHealth = field(default_factory=CacheHealth)
    """What is known of the common prefix cache."""

    def replicas(self, router: Router, component: Component) -> Replicas | None:
        """The replica counts of a component; None if its Deployment or StatefulSet has not been created."""
        kind = "StatefulSet" if component == "redis" else "Deployment"
        child = self.children.get((kind, child_name(router, component)))
        return child.replicas if child else None

    def problem(self, component: Component) -> Problem | None:
        """The most severe problem of a component's pods; None if they are ready."""
        return most_severe([pod.problem for pod in self.pods if pod.component == component and pod.problem])

    def cause(self, router: Router, component: Component) -> str:
        """Why replicas of a component are not ready: the problem of a pod, or why pods cannot be created.

        Empty if neither is known.
        """
        if problem := self.problem(component):
            return problem.message
        replicas = self.replicas(router, component)
        return f"pods cannot be created: {replicas.failure}" if replicas and replicas.failure else ""

    def with_cause(self, message: str, router: Router, component: Component) -> str:
        """A message, followed by the cause if it is known."""
        cause = self.cause(router, component)
        return f"{message}: {cause}" if cause else message


def failed_rollouts(router: Router, observed: StatusInput) -> str:
    """The rollouts that have exceeded their progress deadline, and why; empty if there are none."""
    messages = []
    for component in (*POOLS, "gateway"):
        replicas = observed.replicas(router, component)
        if replicas is not None and replicas.stalled:
            cause = observed.cause(router, component) or replicas.stalled
            messages.append(f"the rollout of the {NOUNS[component]} has failed: {cause}")
    return "; ".join(messages)


def progressing(router: Router, observed: StatusInput) -> Condition:
    """Whether changes are being applied or rolled out."""
    if router.spec.paused:
        message = "spec.paused is true: changes are not applied; set it to false to apply them"
        return Condition("Progressing", "False", "Paused", message)
    if observed.failure is not None:
        return Condition("Progressing", "True", "Retrying", str(observed.failure))
    if failed := failed_rollouts(router, observed):
        return Condition("Progressing", "False", "ProgressDeadlineExceeded", failed)
    if rollout := _rollout(router, observed):
        return Condition("Progressing", "True", "RollingOut", rollout)
    message = "all replicas are ready and up to date"
    if observed.kept:
        subject = "both pools keep" if len(observed.kept) > 1 else f"the {observed.kept[0]} pool keeps"
        message += f"; {subject} the pod template of another operator release (spec.engine.upgradePolicy)"
    return Condition("Progressing", "False", "Settled", message)


def _rollout(router: Router, observed: StatusInput) -> str:
    """The rollout in progress, with what delays it; empty if there is none."""
    if observed.waiting_pool:
        other = other_pool(observed.waiting_pool)
        message = f"the rollout of the {observed.waiting_pool} pool starts after that of the {other} pool"
        return observed.with_cause(message, router, other)
    deployed = {"redis": router.redis, "mooncake": router.mooncake_master}
    for component in NOUNS:
        replicas = observed.replicas(router, component)
        if deployed.get(component, router) is not None and (replicas is None or not replicas.settled):
            message = f"the {NOUNS[component]} is rolling out"
            return observed.with_cause(message, router, component)
    return ""


def component_conditions(router: Router, observed: StatusInput) -> list[Condition]:
    """One condition for each component."""
    if reference := router.spec.session_store.url_secret_ref:
        message = f"the gateways use the Redis of Secret {reference.name}; see metric dps_state_degraded for its health"
        store = Condition("SessionStoreReady", "True", "External", message)
    else:
        store = _component_ready(router, observed, "redis", "SessionStoreReady")
    return [
        _component_ready(router, observed, "speculative", "SpeculativePoolReady"),
        _component_ready(router, observed, "greedy", "GreedyPoolReady"),
        store,
        _component_ready(router, observed, "gateway", "GatewayReady"),
    ]


def _component_ready(
    router: Router, observed: StatusInput, component: Component, type: ConditionType
) -> Condition:
    """Whether a component can serve, which requires one available replica."""
    replicas = observed.replicas(router, component)
    if replicas is None:
        return Condition(type, "False", "NotCreated", f"the {NOUNS[component]} has not been created yet")
    if router.spec.suspend and not router.spec.paused and component in POOLS:
        message = "spec.suspend is true: the engines are stopped, and requests are answered with 503"
        return Condition(type, "False", "Suspended", message)
    if component in router.scaled_to_zero:
        message = f"the {NOUNS[component]} is idle; it starts when requests arrive for it"
        return Condition(type, "False", "ScaledToZero", message)
    if replicas.desired == 0:
        message = f"the {NOUNS[component]} has been scaled to 0 replicas; scale it up to serve requests"
        return Condition(type, "False", "ScaledToZero", message)
    problem, cause = observed.problem(component), observed.cause(router, component)
    count = f"{replicas.ready} of {replicas.desired} replicas are ready"
    if replicas.ready >= replicas.desired:
        return Condition(type, "True", "AllReplicasReady", count)
    if replicas.ready > 0:
        return Condition(type, "True", "SomeReplicasReady", "; ".join(filter(None, [count, cause])))
    if problem:
        return Condition(type, "False", problem.reason, problem.message)
    if cause:
        return Condition(type, "False", "PodsForbidden", cause)
    return Condition(type, "False", "Starting", count)


def autoscaling(router: Router, observed: StatusInput) -> list[Condition]:
    """Whether the autoscalers work; empty if there are none. Without its metric, an autoscaler changes nothing."""
    components: list[Component] = [name for name in POOLS if router.pools[name].has_autoscaler]
    if router.spec.gateway.autoscaling is not None:
        components.append("gateway")
    if not components or router.spec.suspend:
        return []
    found = {}
    for name in components:
        child = observed.children.get(("HorizontalPodAutoscaler", child_name(router, name)))
        found[name] = child.scaling_failure if child is not None else None
    failures = [
        f"the autoscaler of the {NOUNS[name]} does not work: {failure}"
        for name, failure in found.items()
        if failure
    ]
    if failures:
        return [Condition("AutoscalingActive", "False", "AutoscalerFailed", "; ".join(failures))]
    if None in found.values():
        return [Condition("AutoscalingActive", "Unknown", "NotEvaluated", "an autoscaler has not run yet")]
    return [Condition("AutoscalingActive", "True", "AutoscalersActive", "all autoscalers read their metrics")]


def route_accepted(router: Router, observed: StatusInput) -> list[Condition]:
    """Whether the Gateways serve the HTTPRoute; empty if the spec has none. Ready does not depend on it."""
    if router.spec.gateway.http_route is None:
        return []
    child = observed.children.get(("HTTPRoute", child_name(router, "gateway")))
    if child is None or child.route_failure is None:
        message = "not every Gateway in spec.gateway.httpRoute.parentRefs has evaluated the HTTPRoute yet"
        return [Condition("RouteAccepted", "Unknown", "NotEvaluated", message)]
    if child.route_failure:
        message = f"a Gateway does not serve the HTTPRoute: {child.route_failure}"
        return [Condition("RouteAccepted", "False", "RouteRejected", message)]
    return [Condition("RouteAccepted", "True", "RouteServed", "all Gateways serve the HTTPRoute")]


def monitored(router: Router, observed: StatusInput) -> list[Condition]:
    """Whether the ServiceMonitor exists; empty if the spec has none."""
    if router.spec.telemetry.service_monitor is None:
        return []
    if observed.unmonitored:
        return [Condition("Monitored", "False", "CRDNotInstalled", observed.unmonitored)]
    if ("ServiceMonitor", child_name(router, "metrics")) not in observed.children:
        return [
            Condition("Monitored", "Unknown", "NotCreated", "the ServiceMonitor has not been created yet")
        ]
    return [Condition("Monitored", "True", "ServiceMonitorCreated", "the ServiceMonitor has been created")]


def demand_measured(router: Router, observed: StatusInput) -> list[Condition]:
    """Whether the demand of the pools is known; empty if they are not scaled by it. Ready does not depend on it."""
    moves = router.allocation is not None
    if router.spec.suspend or (not moves and not router.may_scale_to_zero):
        return []
    effect = "replicas move between the pools" if moves else "pools are scaled to or from zero"
    if observed.unmeasured is None:
        return [Condition("DemandMeasured", "Unknown", "NotMeasured", "the demand has not been measured yet")]
    if observed.unmeasured:
        message = f"no {effect}, because their demand is unknown: {observed.unmeasured}"
        return [Condition("DemandMeasured", "False", "GatewaysUnreachable", message)]
    message = f"{effect} according to their demand"
    if moves and router.load_ratio is not None:
        message += (
            f", towards {router.load_ratio:g} times as many requests per speculative replica as per greedy one, "
            "as the last calibration recommends"
        )
    elif moves:
        message += ", towards the same number of requests per replica"
    return [Condition("DemandMeasured", "True", "Measured", message)]


def routing_calibrated(router: Router, observed: StatusInput) -> list[Condition]:
    """Whether the last calibration has found a result; empty without calibrations. Ready does not depend on it."""
    calibration = router.spec.routing.calibration
    if calibration is None:
        return []
    ended = [pod.calibrated for pod in observed.pods if pod.calibrated]
    last = max(ended, key=lambda each: each.time, default=None)
    if last is not None and last.failure:
        return [Condition("RoutingCalibrated", "False", "CalibrationFailed", last.failure)]
    waiting = [pod.problem for pod in observed.pods if pod.component == "calibration" and not pod.calibrated]
    problem = most_severe([each for each in waiting if each is not None and each.reason != "Starting"])
    if problem is not None:
        return [Condition("RoutingCalibrated", "False", problem.reason, problem.message)]
    if router.recommended is None:
        message = (
            f"no calibration has finished yet; the schedule is '{calibration.schedule}', in UTC, and kubectl create job"
            f" --from=cronjob/{child_name(router, 'calibration')} NAME starts one now"
        )
        return [Condition("RoutingCalibrated", "Unknown", "NotCalibrated", message)]
    if calibration.apply:
        return [Condition("RoutingCalibrated", "True", "Applied", router.recommended.verdict)]
    return [Condition("RoutingCalibrated", "True", "Recommended", router.recommended.verdict)]


def prefix_cache_conditions(router: Router, observed: StatusInput) -> list[Condition]:
    """Whether the pools can read each other's pages, and do; empty if each engine has its own prefix cache."""
    if found := router.unshareable:
        message = f"each engine has its own prefix cache: {found.message}"
        return [Condition("PrefixCacheShared", "False", found.reason, message)]
    if router.shared_cache is None:
        return []
    health, master = observed.cache_health, observed.replicas(router, "mooncake")
    if router.mooncake_master is None or (master is not None and master.ready > 0):
        return [_shared(health), _serving(health)]
    cause = observed.with_cause("the Mooncake master is not ready", router, "mooncake")
    message = f"{cause}; running engines serve but share no pages, and new engines cannot start"
    return [_shared(health), Condition("PrefixCacheServing", "False", "MasterNotReady", message)]


def _shared(health: CacheHealth) -> Condition:
    """Whether the pools share pages, given that they can according to the spec."""
    for pool, problem in health.unshared.items():
        message = f"an engine of the {pool} pool shares no pages: {problem}"
        return Condition("PrefixCacheShared", "False", "EngineNotSharing", message)
    if health.different:
        message = (
            "each pool stores pages that the other one cannot read; compare the log lines with 'dps prefix cache: "
            "shared' of both pools"
        )
        return Condition("PrefixCacheShared", "False", "GeometryDiffers", message)
    if silent := [pool for pool in POOLS if pool not in health.reporting]:
        message = f"{_pools(silent)} have not reported whether they share pages"
        return Condition("PrefixCacheShared", "Unknown", "NotReported", message)
    message = "the engines of both pools can read each other's pages"
    return Condition("PrefixCacheShared", "True", "BothWays", message)


def _serving(health: CacheHealth) -> Condition:
    """Whether the storage of the common prefix cache serves the pages that it should contain."""
    if health.full:
        message = f"{_pools(health.full)} cannot store most of their pages, because the storage has too little space"
        return Condition("PrefixCacheServing", "False", "StorageFull", message)
    if health.failing:
        message = (
            f"{_pools(health.failing)} cannot write or read most of their pages; see the outcomes of "
            "dps_prefix_cache_pages_total in their metrics"
        )
        return Condition("PrefixCacheServing", "False", "StorageFailing", message)
    if health.slow:
        found = " and ".join(f"the {pool} pool ({text})" for pool, text in health.slow.items())
        message = f"fetching tokens takes longer than computing them in {found}"
        return Condition("PrefixCacheServing", "False", "StorageSlow", message)
    if health.unreachable:
        return Condition("PrefixCacheServing", "Unknown", "GatewaysUnreachable", health.unreachable)
    if not health.judged:
        message = "too few sessions have changed pools since the operator was started"
        return Condition("PrefixCacheServing", "Unknown", "NotMeasured", message)
    if health.unserved:
        message = (
            f"{_pools(health.unserved)} fetch less than half of the tokens that the storage should contain; look for "
            "lines with 'dps prefix cache' in their logs"
        )
        return Condition("PrefixCacheServing", "False", "StorageNotServing", message)
    return Condition("PrefixCacheServing", "True", "StorageServing", "the engines fetch from the storage")


def _pools(names: Collection[PoolName]) -> str:
    return f"the engines of the {' and '.join(f'{pool} pool' for pool in POOLS if pool in names)}"


def conditions(router: Router, observed: StatusInput) -> list[Condition]:
    """All conditions of a DPSRouter with a parsable spec; Ready first."""
    warning = ""
    if not observed.invalid:
        with suppress(SpecError):  # the spec has not been checked yet
            warning = memory_warning(router)
    valid = spec_valid(observed.invalid, "; ".join(observed.rejected), warning)
    components = component_conditions(router, observed)
    idle = {f"{pool.capitalize()}PoolReady" for pool in router.scaled_to_zero}
    required = [valid, *(component for component in components if component.type not in idle)]
    features = [
        *autoscaling(router, observed),
        *route_accepted(router, observed),
        *monitored(router, observed),
        *prefix_cache_conditions(router, observed),
        *demand_measured(router, observed),
        *routing_calibrated(router, observed),
    ]
    warnings = [feature.message for feature in features if feature.status == "False"]
    if failed := failed_rollouts(router, observed):
        warnings.insert(0, failed)
    return [
        _ready(required, router.scaled_to_zero, warnings),
        progressing(router, observed),
        valid,
        *components,
        *features,
    ]


def spec_valid(invalid: str, rejected: str = "", warning: str = "") -> Condition:
    """Whether the spec can be applied.

    invalid: why it cannot be applied; empty if it can. rejected: why some of the objects cannot be applied; empty if
    all can. warning: what may be wrong nevertheless.
    """
    if invalid:
        message = f"{invalid}; running workloads are not changed"
        return Condition("SpecValid", "False", "InvalidSpec", message)
    if rejected:
        message = f"{rejected}; the other objects of the DPSRouter are applied"
        return Condition("SpecValid", "False", "InvalidSpec", message)
    return Condition("SpecValid", "True", "Accepted", "; ".join(filter(None, ["the spec is valid", warning])))


def _ready(
    required: Sequence[Condition], scaled_to_zero: Sequence[PoolName], warnings: Sequence[str]
) -> Condition:
    """Whether requests are served. scaled_to_zero: the idle pools. warnings: problems that do not prevent this."""
    for condition in required:
        if condition.status != "True":
            return Condition("Ready", "False", condition.reason, condition.message)
    serving = "requests are served by both pools"
    if len(scaled_to_zero) == len(POOLS):
        serving = "both pools are idle and scaled to zero; requests wait until an engine has started"
    elif scaled_to_zero:
        (idle,) = scaled_to_zero
        serving = (
            f"requests are served by the {other_pool(idle)} pool; the {idle} pool is idle and scaled to zero"
        )
    return Condition("Ready", "True", "Serving", "; ".join([serving, *warnings]))
