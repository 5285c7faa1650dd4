"""The search of `dps calibrate`: it finds what an exhaustive search finds, with fewer simulations."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import POLICIES, DeltaPrefill, TotalLength
from dps_lab.calibrate.goal import Goal
from dps_lab.calibrate.result import Calibration, conclude
from dps_lab.calibrate.search import Search, Thresholds, roundest
from dps_lab.calibrate.setup import Conditions, Measurement, Setup
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.run import Load
from dps_lab.simulate.trace import SessionTrace, TurnLengths
from dps_lab.simulate.workloads import load_workload

FIGURES = Measurement(
    session_median=1.0,
    session_p95=2.0,
    batch=10.0,
    ttft_median=0.1,
    ttft_p95=0.5,
    tpot_median=0.01,
    speculative_share=0.5,
)
FLEET = FleetSpec(engines=dict.fromkeys(Pool, 1))


def sessions(*deltas: int) -> list[SessionTrace]:
    """One session of one turn for each ΔL."""
    return [
        SessionTrace(id=f"s{number}", turns=[TurnLengths(prompt_tokens=delta, output_tokens=5)])
        for number, delta in enumerate(deltas)
    ]


def search_with(cost: Callable[[Setup], float], goal: Goal = Goal(), *deltas: int) -> Search:  # noqa: B008
    """A search in which `cost` is the session latency and a tenth of the TTFT, instead of a simulation."""

    def measure(setup: Setup, seed: int) -> Measurement:
        return replace(FIGURES, session_median=cost(setup), ttft_p95=1 / cost(setup))

    return Search(measure, Thresholds.of(sessions(*(deltas or range(10, 5000, 10)))), goal)


@pytest.mark.parametrize(
    ("workload", "count", "load", "fleet"),
    [
        pytest.param("bfcl", 12, Load(concurrency=8), FLEET, id="bfcl, c = 8"),
        pytest.param(
            "bfcl", 12, Load(concurrency=4), replace(FLEET, serialized=True, cache="common"), id="serialized"
        ),
        pytest.param(
            "tau-bench", 2, Load(concurrency=2), replace(FLEET, cache="common"), id="tau-bench, c = 2"
        ),
        pytest.param(
            "toolbench", 10, Load(rate=2.0), replace(FLEET, serialized=True), id="toolbench, Poisson"
        ),
        pytest.param("mooncake", 3, Load(concurrency=2), FLEET, id="mooncake, c = 2"),
    ],
)
def test_choice_is_within_2_percent_of_an_exhaustive_search(
    workload: str, count: int, load: Load, fleet: FleetSpec
) -> None:
    chosen = load_workload(workload)[:count]
    measure = cache(Conditions(chosen, load, fleet).measure)
    for splits in ([0, 1, 2], [1]):
        results: list[float] = []
        for exhaustive in (False, True):
            search = Search(measure, Thresholds.of(chosen), Goal(), seeds=(0,))
            found = search.run_exhaustively(splits, 2, 24) if exhaustive else search.run(splits, 2)
            results.append(next(iter(found.values())).session_median)
        assert results[0] <= results[1] * 1.02, splits


def test_exhaustive_search_tries_every_split_and_every_policy_but_random() -> None:
    search = search_with(lambda setup: 1.0)
    search.run_exhaustively([0, 1, 2], 2, 5)
    tried = {(setup.speculative, setup.policy) for setup in search.explored}
    mixed = {(1, policy) for policy in POLICIES if policy != "Random"}
    assert tried == {(0, "AlwaysGreedy"), (2, "AlwaysSpeculative")} | mixed
    assert search.run([0, 1, 2], 2).keys() <= search.explored.keys()


def test_search_finds_the_split_of_many_engines_without_trying_every_split() -> None:
    def cost(setup: Setup) -> float:
        return 1 + (setup.speculative - 37) ** 2 / 1000 + 0.001 * (setup.policy != "TotalLength")

    search = search_with(cost)
    choice = next(iter(search.run(list(range(65)), 64)))
    assert (choice.speculative, choice.greedy, choice.policy) == (37, 27, "TotalLength")
    assert len({setup.speculative for setup in search.explored}) < 25


def test_search_refines_the_threshold_between_coarse_values() -> None:
    def cost(setup: Setup) -> float:
        if setup.policy != "DeltaPrefill":
            return 3.0
        assert setup.threshold_tokens is not None
        return 1 + abs(setup.threshold_tokens - 800) / 1000

    search = search_with(cost)
    choice = next(iter(search.run([1], 2)))
    assert choice.policy == "DeltaPrefill"
    assert choice.threshold_tokens == pytest.approx(800, abs=80)
    assert search.runs < 60


def conclusion(cost: Callable[[Setup], float], goal: Goal = Goal()) -> Calibration:  # noqa: B008
    search = search_with(cost, goal)
    return conclude(search, goal, search.run([0, 1, 2], 2), alone=2)


def test_two_pools_are_called_the_wrong_answer_if_one_pool_is_better() -> None:
    result = conclusion(lambda setup: 2.0 if setup.two_pools else 1.0 + setup.greedy / 10)
    assert result.choice == Setup(2, 0, "AlwaysSpeculative")
    assert result.verdict().startswith(
        "Two pools are not worthwhile for this workload and load: compared with speculative=2,greedy=0, the median"
    )
    assert result.verdict().endswith("is 100.0% higher.")


@pytest.mark.parametrize(
    ("cost", "start"),
    [
        (lambda setup: 1.0 if setup.two_pools else 1.5, "Two pools are worthwhile"),
        (lambda setup: 1.0 if setup.two_pools else 1.01, "Two pools gain little"),
        (lambda setup: 1.01 if setup.two_pools else 1.0, "Two pools gain nothing"),
    ],
)
def test_verdict_depends_on_the_gain_of_two_pools(cost: Callable[[Setup], float], start: str) -> None:
    assert conclusion(cost).verdict().startswith(start)


def test_verdict_does_not_report_equal_figures_as_higher() -> None:
    assert conclusion(lambda setup: 1.0).verdict().endswith(", DeltaPrefill, τ = 128, is the same.")


@pytest.mark.parametrize(
    ("within_limit", "verdict"),
    [
        (
            True,
            "Two pools are worthwhile for this workload and load: no fleet with one pool meets the limits.",
        ),
        (
            False,
            "Two pools are not worthwhile for this workload and load: no set-up of two pools meets the limits.",
        ),
    ],
)
def test_verdict_does_not_recommend_what_exceeds_the_limits(within_limit: bool, verdict: str) -> None:
    """The set-ups that exceed the limit have the lower latency."""

    def cost(setup: Setup) -> float:
        return 2.0 if setup.two_pools is within_limit else 1.0

    result = conclusion(cost, Goal("session", (("ttft-p95", 0.7),)))
    assert result.choice.two_pools is within_limit
    assert result.verdict() == verdict


def test_alternatives_are_reported_with_their_loss() -> None:
    result = conclusion(lambda setup: 1.0 if setup.policy == "TotalLength" else 1.5)
    losses = {each.name: each.loss for each in result.alternatives}
    assert losses["greedy only"] == losses["always speculative"] == losses["default"] == pytest.approx(0.5)
    assert losses["best DeltaPrefill"] == pytest.approx(0.5)


def test_flatness_is_the_range_of_thresholds_within_2_percent() -> None:
    def cost(setup: Setup) -> float:
        if setup.policy != "DeltaPrefill":
            return 3.0
        return 1.0 if 900 <= (setup.threshold_tokens or 0) <= 3000 else 2.0

    flatness = conclusion(cost).flatness
    assert flatness is not None
    assert 900 <= flatness.lowest_tokens < flatness.highest_tokens <= 3000


def test_a_set_up_within_the_limits_is_preferred_to_a_faster_one() -> None:
    goal = Goal("session", (("ttft-p95", 0.6),))
    result = conclusion(lambda setup: 2.0 if setup.greedy == 2 else 1.0, goal)
    assert (result.choice.fleet, result.excess) == ("speculative=0,greedy=2", 0.0)


def test_the_smallest_excess_is_chosen_if_no_set_up_meets_the_limits() -> None:
    goal = Goal("session", (("ttft-p95", 0.25),))
    result = conclusion(lambda setup: 2.0 if setup.greedy == 2 else 1.0, goal)
    assert result.choice.fleet == "speculative=0,greedy=2"
    assert result.excess == pytest.approx(1.0)


@given(st.integers(0, 100_000), st.integers(1, 100_000))
def test_roundest_number_is_in_its_range(low: int, width: int) -> None:
    assert low <= roundest(low, low + width) < low + width


@pytest.mark.parametrize(
    ("low", "end", "expected"), [(97, 131, 100), (127, 130, 127), (95, 101, 100), (0, 5, 0)]
)
def test_roundest_number_has_the_most_trailing_zeros(low: int, end: int, expected: int) -> None:
    assert roundest(low, end) == expected


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_a_rounded_threshold_routes_every_turn_like_the_length_it_stands_for(deltas: list[int]) -> None:
    thresholds = Thresholds.of(sessions(*deltas))
    for policy, build in (("DeltaPrefill", DeltaPrefill), ("TotalLength", TotalLength)):
        for position, value in enumerate(thresholds.values[policy]):
            rounded = build(thresholds.tokens(policy, position)).threshold_tokens
            assert rounded is not None
            assert [delta <= rounded for delta in deltas] == [delta <= value for delta in deltas]


def test_a_workload_whose_turns_are_all_equally_long_has_no_threshold() -> None:
    assert Thresholds.of(sessions(50, 50)).coarse("DeltaPrefill", 8) == []


def test_thresholds_are_the_lengths_of_sessions_with_a_rewritten_history() -> None:
    lengths = (100, 250, 120, 300)
    turns = [TurnLengths(prompt_tokens=tokens, output_tokens=5) for tokens in lengths]
    shares = Thresholds.of([SessionTrace(id="s", turns=turns)]).shares
    assert shares == {"DeltaPrefill": [100, 120, 150, 180], "TotalLength": [100, 120, 250, 300]}


def test_thresholds_do_not_need_the_memory_of_all_prompts() -> None:
    """The operator's Job has 2 GiB. The prompts of this workload take 80 MB."""
    turns = [TurnLengths(prompt_tokens=400 * (turn + 1), output_tokens=5) for turn in range(50)]
    workload = [SessionTrace(id=f"s{number}", turns=turns) for number in range(20)]
    tracemalloc.start()
    try:
        Thresholds.of(workload)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
