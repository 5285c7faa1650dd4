"""The search of `dps calibrate`: what it simulates, what it chooses, and what it says about the choice."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml

from dps_gateway.routing.policies import POLICIES
from dps_lab.calibrate.report import Calibration, conclude
from dps_lab.calibrate.search import Goal, Rule, Search, Setup, find_rule, thresholds
from dps_lab.simulate.report import Report, Spread
from dps_lab.simulate.trace import SessionTrace, TurnLengths

FIGURES = Report(
    batch_seconds=10.0,
    gpus=2,
    session_seconds=Spread(1.0, 1.0, 2.0),
    time_to_first_token_seconds=Spread(0.1, 0.1, 0.5),
    time_per_token_seconds=0.01,
    tokens_per_second=100.0,
    speculative_share=0.5,
    moved_share=0.0,
    regret=0.0,
)


def figures(session: float, first_token: float = 0.5) -> Report:
    """Figures with this median session latency and this 95th percentile of the time to first token."""
    return replace(
        FIGURES,
        session_seconds=Spread(session, session, 2 * session),
        time_to_first_token_seconds=Spread(first_token / 5, first_token / 5, first_token),
    )


LENGTHS = {policy: list(range(300, 4800, 300)) for policy in ("DeltaPrefill", "TotalLength")}


NO_GOAL = Goal()


def search_with(cost: Callable[[Setup], float], goal: Goal = NO_GOAL) -> Search:
    """A search in which `cost` is the session latency and the inverse of the TTFT, instead of a simulation."""

    def measure(setup: Setup, seed: int) -> Report:
        return figures(cost(setup), 1 / cost(setup))

    return Search(measure, LENGTHS, goal)


def conclusion(cost: Callable[[Setup], float], goal: Goal = NO_GOAL) -> Calibration:
    search = search_with(cost, goal)
    return conclude(search, search.run([0, 1, 2], 2), alone=2)


def test_every_split_and_every_policy_but_random_is_tried() -> None:
    search = search_with(lambda setup: 1.0)
    search.run([0, 1, 2], 2)
    tried = {(setup.speculative, setup.policy) for setup in search.explored}
    mixed = {(1, policy) for policy in POLICIES if policy != "Random"}
    assert tried == {(0, "AlwaysGreedy"), (2, "AlwaysSpeculative")} | mixed
    assert {setup.threshold_tokens for setup in search.explored} == {None, *LENGTHS["TotalLength"]}


def test_the_best_split_policy_and_threshold_are_chosen() -> None:
    def cost(setup: Setup) -> float:
        if setup.policy != "TotalLength":
            return 3.0
        return 1 + abs(setup.speculative - 5) + abs((setup.threshold_tokens or 0) - 900) / 1000

    assert next(iter(search_with(cost).run(list(range(9)), 8))) == Setup(5, 3, "TotalLength", 900)


@pytest.mark.parametrize(
    ("within_limit", "verdict"),
    [
        (True, "are worthwhile for this workload and load: no fleet with one pool meets the limits."),
        (False, "are not worthwhile for this workload and load: no set-up of two pools meets the limits."),
    ],
)
def test_verdict_does_not_recommend_what_exceeds_the_limits(within_limit: bool, verdict: str) -> None:
    """The set-ups that exceed the limit have the lower latency."""

    def cost(setup: Setup) -> float:
        return 2.0 if setup.two_pools is within_limit else 1.0

    result = conclusion(cost, Goal("session", (("ttft-p95", 0.7),)))
    assert result.choice.two_pools is within_limit
    assert result.verdict() == f"Two pools {verdict}"


@pytest.mark.parametrize(
    ("limit", "excess"), [pytest.param(0.6, 0.0, id="met"), pytest.param(0.25, 1.0, id="met by none")]
)
def test_set_up_with_the_smallest_excess_over_the_limits_is_preferred_to_a_faster_one(
    limit: float, excess: float
) -> None:
    goal = Goal("session", (("ttft-p95", limit),))
    result = conclusion(lambda setup: 2.0 if setup.greedy == 2 else 1.0, goal)
    assert result.choice.fleet == "speculative=0,greedy=2"
    assert result.excess == pytest.approx(excess)


@pytest.mark.parametrize(
    ("cost", "replicas"),
    [
        (lambda setup: 1.0 if setup.two_pools else 2.0, {"speculative": 1, "greedy": 1}),
        (lambda setup: 2.0 if setup.greedy else 1.0, {"speculative": 2, "greedy": 1}),
    ],
    ids=["two pools", "one pool"],
)
def test_a_patch_keeps_one_replica_in_each_pool(
    cost: Callable[[Setup], float], replicas: dict[str, int]
) -> None:
    result = conclusion(cost)
    spec = yaml.safe_load(result.patch())["spec"]
    assert spec["routing"]["policy"] == result.choice.policy
    assert {pool: each["replicas"] for pool, each in spec["pools"].items()} == replicas


def test_a_workload_whose_turns_are_all_equally_long_has_no_threshold() -> None:
    turn = TurnLengths(prompt_tokens=50, output_tokens=5)
    workload = [SessionTrace(id=f"s{number}", turns=[turn]) for number in range(2)]
    assert thresholds(workload) == {"DeltaPrefill": [], "TotalLength": []}


def test_thresholds_are_the_lengths_of_sessions_with_a_rewritten_history() -> None:
    turns = [TurnLengths(prompt_tokens=tokens, output_tokens=5) for tokens in (100, 250, 120, 300)]
    found = thresholds([SessionTrace(id="s", turns=turns)])
    assert found == {"DeltaPrefill": [100, 120, 150], "TotalLength": [100, 120, 250]}


def test_thresholds_do_not_need_the_memory_of_all_prompts() -> None:
    """The operator's Job has 2 GiB. The prompts of this workload take 80 MB."""
    turns = [TurnLengths(prompt_tokens=400 * (turn + 1), output_tokens=5) for turn in range(50)]
    workload = [SessionTrace(id=f"s{number}", turns=turns) for number in range(20)]
    tracemalloc.start()
    try:
        thresholds(workload)
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


LIMIT = Goal(limits=(("ttft-p95", 0.6),))


@pytest.mark.parametrize(
    ("equal", "other", "goal", "expected"),
    [
        pytest.param(figures(1.0), figures(0.75), Goal(), Rule(2.0, 0.25), id="better"),
        pytest.param(figures(1.0), figures(0.99), Goal(), Rule(1.0, 0.0), id="hardly better"),
        pytest.param(figures(1.0), figures(1.1), Goal(), Rule(1.0, 0.0), id="worse"),
        pytest.param(figures(1.0), figures(0.8, 0.7), LIMIT, Rule(1.0, 0.0), id="better, but beyond a limit"),
        pytest.param(
            figures(1.0, 0.7), figures(1.25), LIMIT, Rule(2.0, -0.25), id="worse, but meets the limit"
        ),
    ],
)
def test_equal_loads_are_kept_unless_another_rule_of_the_budget_is_better(
    equal: Report, other: Report, goal: Goal, expected: Rule
) -> None:
    assert find_rule({1.0: equal, 2.0: other}, goal) == expected
