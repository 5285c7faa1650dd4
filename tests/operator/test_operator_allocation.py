"""The rules of spec.gpuBudget."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_engines.pools import POOLS
from dps_operator.api import Allocation
from dps_operator.autoscale import moved
from dps_operator.objects import child_manifest
from dps_operator.observe import Observations
from dps_testkit.operator.routers import SMALLEST, router
from tests.operator.harness import KEY
from tests.operator.objects import pod

BUDGET: dict[str, Any] = {**SMALLEST, "gpuBudget": {"gpus": 4}}
NOW = "2026-01-01T00:00:00Z"

counts = st.integers(1, 50)
ratios = st.floats(0.1, 10)
demands = st.fixed_dictionaries({pool: st.floats(0, 10_000) for pool in POOLS})


def allocated(speculative: int, greedy: int, moved_at: str | None = None) -> Allocation:
    return Allocation(speculative_replicas=speculative, greedy_replicas=greedy, last_move_time=moved_at)


def highest_load(allocation: Allocation, demand: dict[Any, float]) -> float:
    return max(demand[pool] / count for pool, count in allocation.counts.items())


MOVES: dict[str, tuple[tuple[int, int], tuple[float, float], float, tuple[int, int] | None]] = {
    "equal load": ((2, 2), (8, 8), 1.0, None),
    "busy greedy pool": ((2, 2), (2, 20), 1.0, (1, 3)),
    "the last replica stays": ((1, 3), (0, 100), 1.0, None),
    "less is gained than the hysteresis": ((2, 2), (8, 19), 1.0, None),
    "more is gained than the hysteresis": ((2, 2), (8, 21), 1.0, (1, 3)),
    "hardly any requests": ((2, 2), (0, 1), 1.0, None),
    "calibrated for a lower load of the speculative pool": ((2, 2), (12, 12), 0.25, (3, 1)),
    "calibrated for a higher load of the speculative pool": ((2, 2), (12, 12), 4.0, (1, 3)),
}


@pytest.mark.parametrize(("before", "demand", "ratio", "after"), MOVES.values(), ids=MOVES.keys())
def test_a_replica_moves_to_the_pool_with_the_higher_load_relative_to_the_calibrated_ratio(
    before: tuple[int, int], demand: tuple[float, float], ratio: float, after: tuple[int, int] | None
) -> None:
    result = moved(allocated(*before), {"speculative": demand[0], "greedy": demand[1]}, NOW, ratio)
    assert result == (allocated(*after, moved_at=NOW) if after else None)


@given(counts, counts, demands, ratios)
def test_a_move_keeps_the_budget_and_both_pools_and_lowers_the_highest_load(
    speculative: int, greedy: int, demand: dict[Any, float], ratio: float
) -> None:
    before = allocated(speculative, greedy)
    after = moved(before, demand, NOW, ratio)
    weighted = {**demand, "speculative": demand["speculative"] / ratio}
    if after is not None:
        assert sum(after.counts.values()) == speculative + greedy
        assert min(after.counts.values()) >= 1
        assert highest_load(after, weighted) < highest_load(before, weighted)


@given(counts, counts, demands, ratios)
def test_at_constant_demand_no_move_is_undone(
    speculative: int, greedy: int, demand: dict[Any, float], ratio: float
) -> None:
    seen = [allocated(speculative, greedy)]
    while (after := moved(seen[-1], demand, NOW, ratio)) is not None:
        assert after.counts not in [one.counts for one in seen]
        seen.append(after)


def requested(allocation: Allocation, desired: dict[str, int], pods: dict[str, int]) -> dict[str, int | None]:
    """The replicas that the pools request. desired: those of the live Deployments. pods: those that exist."""
    seen = Observations()
    seen.allocations[KEY] = allocation
    for pool in POOLS:
        spec = {"replicas": desired[pool], "template": {"spec": {"containers": [{}]}}}
        seen.update_child(child_manifest(router(SMALLEST), "Deployment", pool, spec=spec))
        for number in range(pods[pool]):
            seen.update_pod(pod(f"{pool}-{number}", pool))
    gpus = sum(allocation.counts.values())
    pools = router({**SMALLEST, "gpuBudget": {"gpus": gpus}}, observations=seen).pools
    return {name: pool.replicas for name, pool in pools.items()}


@settings(max_examples=50)
@given(counts, counts, *[st.integers(0, 100)] * 4)
def test_requested_replicas_never_need_more_gpus_than_are_free(
    speculative: int, greedy: int, desired_a: int, desired_b: int, pods_a: int, pods_b: int
) -> None:
    allocation = allocated(speculative, greedy)
    desired = {"speculative": desired_a, "greedy": desired_b}
    pods = {"speculative": pods_a, "greedy": pods_b}
    result = requested(allocation, desired, pods)
    for pool, other in (POOLS, POOLS[::-1]):
        count = result[pool]
        assert count is not None
        assert 1 <= count <= allocation.counts[pool]
        grows = count > max(desired[pool], 1)
        assert not grows or count + pods[other] <= speculative + greedy


STATUSES: dict[str, tuple[int, dict[str, Any], Allocation]] = {
    "no status": (5, {}, allocated(3, 2)),
    "unchanged": (4, {"speculativeReplicas": 1, "greedyReplicas": 3}, allocated(1, 3)),
    "smaller budget": (2, {"speculativeReplicas": 1, "greedyReplicas": 3}, allocated(1, 1)),
    "larger budget": (8, {"speculativeReplicas": 1, "greedyReplicas": 3}, allocated(2, 6)),
    "time of the last move": (
        2,
        {"speculativeReplicas": 1, "greedyReplicas": 1, "lastMoveTime": NOW},
        allocated(1, 1, NOW),
    ),
}


@pytest.mark.parametrize(("gpus", "status", "expected"), STATUSES.values(), ids=STATUSES.keys())
def test_the_allocation_is_that_of_the_status_scaled_to_the_budget(
    gpus: int, status: dict[str, Any], expected: Allocation
) -> None:
    recorded = {"gpuBudget": status} if status else {}
    assert router({**SMALLEST, "gpuBudget": {"gpus": gpus}}, status=recorded).allocation == expected


def test_each_replica_counts_as_its_gpus_and_a_remainder_is_unused() -> None:
    spec = {**SMALLEST, "engine": {"tensorParallel": 2}, "gpuBudget": {"gpus": 7}}
    assert router(spec).allocation == allocated(2, 1)
    assert router(SMALLEST).allocation is None


def test_rollouts_stay_within_the_budget_unless_a_strategy_is_set() -> None:
    default = router(BUDGET).pools["greedy"].spec.strategy
    assert (default.max_surge, default.max_unavailable) == (0, 1)
    own = {**BUDGET, "pools": {**SMALLEST["pools"], "greedy": {"strategy": {"type": "Recreate"}}}}
    assert router(own).pools["greedy"].spec.strategy.type == "Recreate"


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_pod_that_has_ended_occupies_no_gpu(phase: str) -> None:
    """The kubelet leaves an evicted pod behind, beside the one that replaces it."""
    seen = Observations()
    seen.update_pod(pod("greedy-1", "greedy", phase="Running"))
    seen.update_pod(pod("greedy-1", "greedy", phase=phase, reason="Evicted"))
    assert seen.pods(KEY) == []
    assert seen.awaiting_volumes() == {}
