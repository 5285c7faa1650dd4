"""The conditions of optional features: autoscaling, the HTTPRoute, monitoring, scaling by demand, and calibration."""

from dps_engines.pools import POOLS
from dps_operator.builders.calibration import DEADLINE_SECONDS
from dps_operator.builders.pool_engines import pool_of
from dps_operator.builders.scaling import has_autoscaler
from dps_operator.calibration import ResultError, newest, read
from dps_operator.resources import Component, Router, child_name
from dps_operator.scale_to_zero.rules import pools_with_zero
from dps_operator.status.condition import Condition
from dps_operator.status.diagnose import last_line, most_severe
from dps_operator.status.observed import NOUNS, Observed


def autoscaling(router: Router, observed: Observed) -> list[Condition]:
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
        f"the autoscaler of the {NOUNS[name]} does not work: {child.scaling.failure}"
        for name, child in found.items()
        if child is not None and child.scaling is not None and child.scaling.failure
    ]
    if failures:
        return [Condition("AutoscalingActive", "False", "AutoscalerFailed", "; ".join(failures))]
    if any(child is None or child.scaling is None for child in found.values()):
        return [Condition("AutoscalingActive", "Unknown", "NotEvaluated", "an autoscaler has not run yet")]
    return [Condition("AutoscalingActive", "True", "AutoscalersActive", "all autoscalers read their metrics")]


def route_accepted(router: Router, observed: Observed) -> list[Condition]:
    """Whether the Gateways serve the HTTPRoute; empty if the spec has none. Ready does not depend on it."""
    if router.spec.gateway.http_route is None:
        return []
    child = observed.children.get(("HTTPRoute", child_name(router, "gateway")))
    if child is None or child.route is None:
        message = "not every Gateway in spec.gateway.httpRoute.parentRefs has evaluated the HTTPRoute yet"
        return [Condition("RouteAccepted", "Unknown", "NotEvaluated", message)]
    if child.route.failure:
        message = f"a Gateway does not serve the HTTPRoute: {child.route.failure}"
        return [Condition("RouteAccepted", "False", "RouteRejected", message)]
    return [Condition("RouteAccepted", "True", "RouteServed", "all Gateways serve the HTTPRoute")]


def monitored(router: Router, observed: Observed) -> list[Condition]:
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


def demand_measured(router: Router, observed: Observed) -> list[Condition]:
    """Whether the demand of the pools is known; empty if they are not scaled by it. Ready does not depend on it."""
    moves = observed.allocation is not None
    if router.spec.suspend or (not moves and not pools_with_zero(router.spec)):
        return []
    effect = "replicas move between the pools" if moves else "pools are scaled to or from zero"
    if observed.unmeasured is None:
        return [Condition("DemandMeasured", "Unknown", "NotMeasured", "the demand has not been measured yet")]
    if observed.unmeasured:
        message = f"no {effect}, because their demand is unknown: {observed.unmeasured}"
        return [Condition("DemandMeasured", "False", "GatewaysUnreachable", message)]
    message = f"{effect} according to their demand"
    if moves and observed.load_ratio is not None:
        message += (
            f", towards {observed.load_ratio:g} times as many requests per speculative replica as per greedy one, "
            "as the last calibration recommends"
        )
    elif moves:
        message += ", towards the same number of requests per replica"
    return [Condition("DemandMeasured", "True", "Measured", message)]


def routing_calibrated(router: Router, observed: Observed) -> list[Condition]:
    """Whether the last calibration has found a result; empty without calibrations. Ready does not depend on it."""
    calibration = router.spec.routing.calibration
    if calibration is None:
        return []
    if failure := _failed_calibration(observed):
        return [Condition("RoutingCalibrated", "False", "CalibrationFailed", failure)]
    waiting = [pod.problem for pod in observed.pods if pod.component == "calibration" and not pod.finished]
    problem = most_severe([each for each in waiting if each is not None and each.reason != "Starting"])
    if problem is not None:
        return [Condition("RoutingCalibrated", "False", problem.reason, problem.message)]
    if ended := _ended_run(router, observed):
        message = (
            f"the last calibration, which began at {ended}, ended without a result: its pod could not start, "
            f"or needed more than {DEADLINE_SECONDS // 60} minutes"
        )
        return [Condition("RoutingCalibrated", "False", "CalibrationFailed", message)]
    if observed.recommended is None:
        message = (
            f"no calibration has finished yet; the schedule is '{calibration.schedule}', in UTC, and kubectl create job"
            f" --from=cronjob/{child_name(router, 'calibration')} NAME starts one now"
        )
        return [Condition("RoutingCalibrated", "Unknown", "NotCalibrated", message)]
    if calibration.apply:
        return [Condition("RoutingCalibrated", "True", "Applied", observed.recommended.verdict)]
    return [Condition("RoutingCalibrated", "True", "Recommended", observed.recommended.verdict)]


def _ended_run(router: Router, observed: Observed) -> str:
    """The time of the last scheduled calibration, if it exceeded its time limit and none has succeeded since.

    Otherwise empty. Kubernetes deletes the pod of such a calibration, so only the CronJob shows it.
    """
    job = observed.children.get(("CronJob", child_name(router, "calibration")))
    ended = job.failed_run if job is not None else ""
    last, recommended = newest(observed.pods), observed.recommended
    known = [last.time if last is not None else "", recommended.time if recommended is not None else ""]
    return ended if ended > max(known) else ""


def _failed_calibration(observed: Observed) -> str:
    """Why the last calibration has no result; empty if it has one, or if none has finished."""
    last = newest(observed.pods)
    if last is None:
        return ""
    if last.exit_code != 0:
        return f"the last calibration failed: {last_line(last.message)}"
    try:
        read(last)
    except ResultError as error:
        return (
            f"the result of the last calibration cannot be read: {error}; check that labImage in the chart's "
            "values has the version of the operator"
        )
    return ""
