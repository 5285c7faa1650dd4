"""What the status of a DPSRouter is built from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dps_engines.pools import PoolName
from dps_operator.api.status import RecommendedRouting
from dps_operator.gpu_budget.allocation import Allocation
from dps_operator.observe import Child, ChildKey, Pod, Replicas
from dps_operator.prefix_cache.health import CacheHealth
from dps_operator.resources import Component, Router, child_name
from dps_operator.status.diagnose import Problem, most_severe

NOUNS: Mapping[Component, str] = {
    "speculative": "speculative pool",
    "greedy": "greedy pool",
    "gateway": "gateway",
    "redis": "session store",
    "mooncake": "Mooncake master",
}
"""The components in messages."""


@dataclass(frozen=True)
class Observed:
    """The children and pods of a DPSRouter, and the results of reconciling it."""

    children: Mapping[ChildKey, Child] = field(default_factory=dict)
    pods: Sequence[Pod] = ()
    invalid: str = ""
    """Why the spec cannot be applied; empty if it can."""
    rejected: str = ""
    """Why some of the objects cannot be applied, in contrast to the others; empty if all can."""
    unmonitored: str = ""
    """Why the ServiceMonitor cannot be applied, which does not affect serving; empty if it can."""
    failing: str = ""
    """Message of a failed API server call; empty if all calls succeeded."""
    waiting_pool: PoolName | None = None
    """The pool whose rollout waits for the other pool's."""
    kept: Sequence[PoolName] = ()
    """The pools that keep the pod template of another operator release."""
    allocation: Allocation | None = None
    """How the pools share the GPU budget; None without one."""
    load_ratio: float | None = None
    """The calibrated ratio of the pools' loads, which the GPU budget keeps; None if they are kept equal."""
    recommended: RecommendedRouting | None = None
    """The result of the last calibration that has found one; None without calibrations."""
    unmeasured: str | None = None
    """Why the demand of the pools is unknown; empty if it is known, None if it has not been measured yet."""
    scaled_to_zero: Sequence[PoolName] = ()
    """The idle pools that the operator has scaled to zero."""
    cache_health: CacheHealth | None = None
    """Whether the pools fetch from the common prefix cache; None if nothing has been observed."""

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
