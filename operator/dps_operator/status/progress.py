"""The condition Progressing: whether changes are being rolled out."""

from dps_engines.pools import POOLS, other_pool
from dps_operator.builders.mooncake import managed_master
from dps_operator.builders.store import managed
from dps_operator.resources import Component, Router
from dps_operator.revisions import kept_suffix
from dps_operator.status.condition import Condition
from dps_operator.status.observed import NOUNS, Observed


def failed_rollouts(router: Router, observed: Observed) -> str:
    """The rollouts that have exceeded their progress deadline, and why; empty if there are none."""
    messages = []
    for component in (*POOLS, "gateway"):
        replicas = observed.replicas(router, component)
        if replicas is not None and replicas.stalled:
            cause = observed.cause(router, component) or replicas.stalled
            messages.append(f"the rollout of the {NOUNS[component]} has failed: {cause}")
    return "; ".join(messages)


def progressing(router: Router, observed: Observed) -> Condition:
    """Whether changes are being applied or rolled out."""
    if router.spec.paused:
        message = "spec.paused is true: changes are not applied; set it to false to apply them"
        return Condition("Progressing", "False", "Paused", message)
    if observed.failing:
        return Condition("Progressing", "True", "Retrying", observed.failing)
    if failed := failed_rollouts(router, observed):
        return Condition("Progressing", "False", "ProgressDeadlineExceeded", failed)
    if rollout := _rollout(router, observed):
        return Condition("Progressing", "True", "RollingOut", rollout)
    message = f"all replicas are ready and up to date{kept_suffix(observed.kept)}"
    return Condition("Progressing", "False", "Settled", message)


def _rollout(router: Router, observed: Observed) -> str:
    """The rollout in progress, with what delays it; empty if there is none."""
    if observed.waiting_pool:
        other = other_pool(observed.waiting_pool)
        message = f"the rollout of the {observed.waiting_pool} pool starts after that of the {other} pool"
        return observed.with_cause(message, router, other)
    for component in _rolled_out(router):
        replicas = observed.replicas(router, component)
        if replicas is None or not replicas.settled:
            message = f"the {NOUNS[component]} is rolling out"
            return observed.with_cause(message, router, component)
    return ""


def _rolled_out(router: Router) -> list[Component]:
    """The components that the operator deploys, in the order in which their rollouts are reported."""
    components: list[Component] = [*POOLS, "gateway"]
    if managed(router) is not None:
        components.append("redis")
    if managed_master(router) is not None:
        components.append("mooncake")
    return components
