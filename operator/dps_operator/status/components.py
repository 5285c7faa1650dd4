"""The conditions of the components on which Ready depends: both pools, the session store and the gateway."""

from dps_engines.pools import POOLS
from dps_operator.api.status import ConditionType
from dps_operator.resources import Component, Router
from dps_operator.status.condition import Condition
from dps_operator.status.observed import NOUNS, Observed


def component_conditions(router: Router, observed: Observed) -> list[Condition]:
    """One condition for each component."""
    return [
        _ready(router, observed, "speculative", "SpeculativePoolReady"),
        _ready(router, observed, "greedy", "GreedyPoolReady"),
        _session_store(router, observed),
        _ready(router, observed, "gateway", "GatewayReady"),
    ]


def _session_store(router: Router, observed: Observed) -> Condition:
    reference = router.spec.session_store.url_secret_ref
    if reference is None:
        return _ready(router, observed, "redis", "SessionStoreReady")
    message = (
        f"the gateways use the Redis of Secret {reference.name}; see metric dps_state_degraded for its health"
    )
    return Condition("SessionStoreReady", "True", "External", message)


def _ready(router: Router, observed: Observed, component: Component, type: ConditionType) -> Condition:
    """Whether a component can serve, which requires one available replica."""
    replicas = observed.replicas(router, component)
    if replicas is None:
        return Condition(type, "False", "NotCreated", f"the {NOUNS[component]} has not been created yet")
    if stopped := _stopped(router, observed, component, type, replicas.desired):
        return stopped
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


def _stopped(
    router: Router, observed: Observed, component: Component, type: ConditionType, desired: int
) -> Condition | None:
    """Why a component has no replicas on purpose; None if it should have some. desired: its number of replicas."""
    if router.spec.suspend and not router.spec.paused and component in POOLS:
        message = "spec.suspend is true: the engines are stopped, and requests are answered with 503"
        return Condition(type, "False", "Suspended", message)
    if component in observed.scaled_to_zero:
        message = f"the {NOUNS[component]} is idle; it starts when requests arrive for it"
        return Condition(type, "False", "ScaledToZero", message)
    if desired == 0:
        message = f"the {NOUNS[component]} has been scaled to 0 replicas; scale it up to serve requests"
        return Condition(type, "False", "ScaledToZero", message)
    return None
