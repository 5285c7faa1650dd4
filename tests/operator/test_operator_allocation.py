"""The rules of spec.gpuBudget, and a simulated day of them."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_engines.pools import POOLS
from dps_operator.gpu_budget.allocation import Allocation, current_allocation, granted, moved, with_replicas
from dps_operator.observe import Observations
from dps_testkit.operator.harness import KEY
from dps_testkit.operator.objects import pod
from dps_testkit.operator.routers import SMALLEST, router

BUDGET: dict[str, Any] = {**SMALLEST, "gpuBudget": {"gpus": 4}}
NOW = "2026-01-01T00:00:00Z"

counts = st.integers(1, 50)
ratios = st.floats(0.1, 10)
demands = st.fixed_dictionaries({pool: st.floats(0, 10_000) for pool in POOLS})


def highest_load(allocation: Allocation, demand: dict[Any, float]) -> float:
    return max(demand[pool] / count for pool, count in allocation.counts.items())


MOVES: dict[str, tuple[tuple[int, int], tuple[float, float], tuple[int, int] | None]] = {
    "equal load": ((2, 2), (8, 8), None),
    "busy greedy pool": ((2, 2), (2, 20), (1, 3)),
    "busy speculative pool": ((2, 2), (20, 2), (3, 1)),
    "the last replica stays": ((1, 3), (0, 100), None),
    "nothing is gained": ((2, 2), (10, 16), None),
    "less is gained than the hysteresis": ((2, 2), (8, 19), None),
    "more is gained than the hysteresis": ((2, 2), (8, 21), (1, 3)),
    "hardly any requests": ((2, 2), (0, 1), None),
}


@pytest.mark.parametrize(("before", "demand", "after"), MOVES.values(), ids=MOVES.keys())
def test_a_replica_moves_to_the_pool_with_the_higher_load(
    before: tuple[int, int], demand: tuple[float, float], after: tuple[int, int] | None
) -> None:
    result = moved(Allocation(*before), {"speculative": demand[0], "greedy": demand[1]}, NOW)
    assert result == (Allocation(*after, moved_at=NOW) if after else None)


@pytest.mark.parametrize(("ratio", "after"), [(0.25, (3, 1)), (1.0, None), (4.0, (1, 3))])
def test_replicas_move_towards_the_calibrated_ratio_of_the_loads(
    ratio: float, after: tuple[int, int] | None
) -> None:
    result = moved(Allocation(2, 2), {"speculative": 12, "greedy": 12}, NOW, ratio)
    assert result is None if after is None else result == Allocation(*after, moved_at=NOW)


@given(counts, counts, demands, ratios)
def test_a_move_keeps_the_budget_and_both_pools_and_lowers_the_highest_load(
    speculative: int, greedy: int, demand: dict[Any, float], ratio: float
) -> None:
    before = Allocation(speculative, greedy)
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
    seen = [Allocation(speculative, greedy)]
    while (after := moved(seen[-1], demand, NOW, ratio)) is not None:
        assert after.counts not in [one.counts for one in seen]
        seen.append(after)


@given(counts, counts, *[st.integers(0, 100)] * 4)
def test_requested_replicas_never_need_more_gpus_than_are_free(
    speculative: int, greedy: int, desired_a: int, desired_b: int, pods_a: int, pods_b: int
) -> None:
    allocation = Allocation(speculative, greedy)
    desired = {"speculative": desired_a, "greedy": desired_b}
    pods = {"speculative": pods_a, "greedy": pods_b}
    result = granted(allocation, desired, pods)
    for pool, other in (POOLS, POOLS[::-1]):
        assert 1 <= result[pool] <= allocation.counts[pool]
        grows = result[pool] > max(desired[pool], 1)
        assert not grows or result[pool] + pods[other] <= speculative + greedy


def test_a_pool_grows_after_the_pods_of_the_other_have_ended() -> None:
    allocation = Allocation(3, 1)
    live = {"speculative": 2, "greedy": 2}
    assert granted(allocation, live, live) == {"speculative": 2, "greedy": 1}
    live["greedy"] = 1
    assert granted(allocation, live, {"speculative": 2, "greedy": 2}) == {"speculative": 2, "greedy": 1}
    assert granted(allocation, live, {"speculative": 2, "greedy": 1}) == {"speculative": 3, "greedy": 1}


STATUSES: dict[str, tuple[int, dict[str, Any], Allocation]] = {
    "no status": (5, {}, Allocation(3, 2)),
    "unchanged": (4, {"speculativeReplicas": 1, "greedyReplicas": 3}, Allocation(1, 3)),
    "smaller budget": (2, {"speculativeReplicas": 1, "greedyReplicas": 3}, Allocation(1, 1)),
    "larger budget": (8, {"speculativeReplicas": 1, "greedyReplicas": 3}, Allocation(2, 6)),
    "time of the last move": (
        2,
        {"speculativeReplicas": 1, "greedyReplicas": 1, "lastMoveTime": NOW},
        Allocation(1, 1, NOW),
    ),
}


@pytest.mark.parametrize(("gpus", "status", "expected"), STATUSES.values(), ids=STATUSES.keys())
def test_the_allocation_is_that_of_the_status_scaled_to_the_budget(
    gpus: int, status: dict[str, Any], expected: Allocation
) -> None:
    spec = router({**SMALLEST, "gpuBudget": {"gpus": gpus}}).spec
    assert current_allocation(spec, {"gpuBudget": status} if status else {}) == expected


def test_each_replica_counts_as_its_gpus_and_a_remainder_is_unused() -> None:
    spec = router({**SMALLEST, "engine": {"tensorParallel": 2}, "gpuBudget": {"gpus": 7}}).spec
    assert current_allocation(spec, {}) == Allocation(2, 1)
    assert current_allocation(router(SMALLEST).spec, {}) is None


def test_rollouts_stay_within_the_budget_unless_a_strategy_is_set() -> None:
    spec = with_replicas(router(BUDGET).spec, {"speculative": 3, "greedy": 1})
    assert (spec.pools.speculative.replicas, spec.pools.greedy.replicas) == (3, 1)
    assert (spec.pools.greedy.strategy.max_surge, spec.pools.greedy.strategy.max_unavailable) == (0, 1)
    own = {**BUDGET, "pools": {**SMALLEST["pools"], "greedy": {"strategy": {"type": "Recreate"}}}}
    assert with_replicas(router(own).spec, {"speculative": 3, "greedy": 1}).pools.greedy.strategy.type == (
        "Recreate"
    )


def test_a_day_with_opposite_peaks_needs_few_moves_and_has_a_lower_peak_load() -> None:
    """Coding agents by day (small ΔL: speculative), batch summaries by night (large ΔL: greedy), 8 replicas."""
    budget = fixed = Allocation(4, 4)
    peak_budget = peak_fixed = 0.0
    moves = 0
    for minute in range(0, 24 * 60, 10):
        daytime = (1 - math.cos(2 * math.pi * minute / (24 * 60))) / 2
        demand: dict[Any, float] = {"speculative": 10 + 90 * daytime, "greedy": 100 - 90 * daytime}
        after = moved(budget, demand, NOW)
        moves += after is not None
        budget = after or budget
        if minute >= 6 * 60:  # after the start from an equal split in the middle of the night's peak
            peak_budget = max(peak_budget, highest_load(budget, demand))
            peak_fixed = max(peak_fixed, highest_load(fixed, demand))
    assert peak_fixed == pytest.approx(25, rel=0.01)
    assert peak_budget < 19
    assert moves <= 15, "3 from the equal split, and 12 during the day"


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_pod_that_has_ended_occupies_no_gpu(phase: str) -> None:
    """The kubelet leaves an evicted pod behind, beside the one that replaces it."""
    seen = Observations()
    seen.update_pod(pod("greedy-1", "greedy", phase="Running"))
    seen.update_pod(pod("greedy-1", "greedy", phase=phase, reason="Evicted"))
    assert seen.pods(KEY) == []
    assert seen.creating() == {}
