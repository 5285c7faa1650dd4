"""How the two pools share a GPU budget: pure rules. `balancer.py` measures the demand and applies them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dps_engines.gpu_budget import Counts, Demand, receiver
from dps_engines.pools import POOLS, PoolName, other_pool
from dps_operator.api.pools import PoolSpec, PoolStrategy
from dps_operator.api.spec import Spec
from dps_operator.builders.pool_engines import pool_of
from dps_operator.calibration import recommendation


@dataclass(frozen=True)
class Allocation:
    """The replicas of both pools, and when the last replica was moved (RFC 3339; None if none was)."""

    speculative: int
    greedy: int
    moved_at: str | None = None

    @property
    def counts(self) -> dict[PoolName, int]:
        """The replicas by pool."""
        return {"speculative": self.speculative, "greedy": self.greedy}

    def to_status(self) -> dict[str, Any]:
        """The allocation as `status.gpuBudget`."""
        moved: dict[str, Any] = {"lastMoveTime": self.moved_at} if self.moved_at else {}
        return {"speculativeReplicas": self.speculative, "greedyReplicas": self.greedy, **moved}


def total_replicas(spec: Spec) -> int:
    """The replicas that the budget allows in both pools together; 0 without a budget."""
    return spec.gpu_budget.gpus // spec.engine.tensor_parallel if spec.gpu_budget else 0


def current_allocation(spec: Spec, status: Mapping[str, Any]) -> Allocation | None:
    """The allocation in the status, scaled if the budget has changed since; None without a budget.

    Without one in the status, the pools have the same number of replicas, and an odd one is speculative.
    """
    total = total_replicas(spec)
    if not total:
        return None
    known = status.get("gpuBudget", {})
    speculative, greedy = known.get("speculativeReplicas", 1), known.get("greedyReplicas", 1)
    if speculative + greedy != total:
        share = -(-total * speculative // (speculative + greedy))
        speculative = min(max(share, 1), total - 1)
    return Allocation(speculative, total - speculative, known.get("lastMoveTime"))


def calibrated_ratio(spec: Spec, status: Mapping[str, Any]) -> float | None:
    """The load ratio that the last calibration has found; None if it is not to be applied, or is for another budget."""
    calibration, recommended = spec.routing.calibration, recommendation(spec, (), status)
    if calibration is None or not calibration.apply or recommended is None:
        return None
    found = recommended.gpu_budget
    if found is None or found.speculative_replicas + found.greedy_replicas != total_replicas(spec):
        return None
    return found.load_ratio


def moved(current: Allocation, demand: Demand, now: str, load_ratio: float = 1.0) -> Allocation | None:
    """The allocation after moving one replica to the pool with the higher load; None if none should be moved.

    load_ratio: see `dps_engines.gpu_budget.receiver`.
    """
    counts = current.counts
    pool = receiver(counts, demand, load_ratio)
    if pool is None:
        return None
    counts[pool] += 1
    counts[other_pool(pool)] -= 1
    return Allocation(counts["speculative"], counts["greedy"], now)


def granted(
    allocation: Allocation, desired: Mapping[str, int], pods: Mapping[str, int]
) -> dict[PoolName, int]:
    """The replicas to request now. A pool grows only when the other pool's pods have released their GPUs.

    Otherwise the new pod would be pending, for which a cluster autoscaler would add a node. desired: `replicas` of the
    live Deployments. pods: existing pods, including those that are terminating.
    """
    counts = allocation.counts
    total = sum(counts.values())
    result = {}
    for pool, other in (POOLS, POOLS[::-1]):
        free = total - pods.get(other, 0)
        result[pool] = min(counts[pool], max(desired.get(pool, 0), free, 1))
    return result


def with_replicas(spec: Spec, counts: Counts) -> Spec:
    """The spec with these replicas, and with rollouts that stay within the budget unless `strategy` is set."""
    within = PoolStrategy(max_surge=0, max_unavailable=1)
    pools: dict[str, PoolSpec] = {}
    for name in POOLS:
        pool = pool_of(spec, name)
        strategy = within if pool.strategy == PoolStrategy() else pool.strategy
        pools[name] = pool.model_copy(update={"replicas": counts[name], "strategy": strategy})
    return spec.model_copy(update={"pools": spec.pools.model_copy(update=pools)})
