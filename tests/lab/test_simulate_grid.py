"""Changes during a simulation, and the comparison of Adaptive with other policies and fleets."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_gateway.routing.decision import Policy
from dps_gateway.routing.policies import AlwaysGreedy, AlwaysSpeculative
from dps_lab.simulate import grid, grid_cli
from dps_lab.simulate.grid import (
    ADAPTIVE,
    Comparison,
    SetUp,
    Times,
    compare,
    compare_after,
    compare_with_change,
    mean_over_seeds,
    repeat,
    repeat_best,
    sample,
    set_ups,
)
from dps_lab.simulate.run import Change, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace, TurnLengths

CELL = SetUp("some", concurrency=2, cache="separate", serialized=False, seed=0)


def trace(sessions: int) -> list[SessionTrace]:
    """Sessions of three turns, each with an answer of 40 tokens."""
    turns = [TurnLengths(prompt_tokens=400 * number, output_tokens=40) for number in (1, 2, 3)]
    return [SessionTrace(id=f"s{number}", turns=turns) for number in range(sessions)]


def mean_seconds(results: Sequence[TurnResult]) -> float:
    return sum(turn.seconds for turn in results) / len(results)


def most_at_once(results: Sequence[TurnResult], start: float, end: float) -> int:
    """The largest number of turns in progress at the moments at which a turn is sent."""
    moments = [turn.sent for turn in results if start <= turn.sent < end]
    return max(sum(turn.sent <= moment < turn.finished for turn in results) for moment in moments)


def test_concurrency_of_a_closed_loop_can_rise_and_fall() -> None:
    changes = (Change(5, concurrency=6), Change(10, concurrency=1))
    scenario = replace(CELL.scenario(AlwaysGreedy()), changes=changes)
    results = simulate(trace(80), scenario)
    assert len(results) == 3 * 80
    assert [most_at_once(results, *window) for window in ((0, 5), (5, 10), (13, 99))] == [2, 6, 1]


@pytest.mark.parametrize("pool", list(Pool))
def test_engines_of_a_pool_can_slow_down(pool: Pool) -> None:
    policy = AlwaysGreedy() if pool is Pool.GREEDY else AlwaysSpeculative()
    usual = CELL.scenario(policy)
    slowed = replace(usual, changes=(Change(0, pool=pool, slowdown=2),))
    unaffected = replace(usual, changes=(Change(0, pool=pool.other, slowdown=2),))
    times = [mean_seconds(simulate(trace(6), scenario)) for scenario in (usual, slowed, unaffected)]
    assert times[1] == pytest.approx(2 * times[0], rel=0.1)
    assert times[2] == times[0]


def test_drafts_can_cease_to_be_accepted() -> None:
    usual = CELL.scenario(AlwaysSpeculative())
    rejected = replace(usual, changes=(Change(0, pool=Pool.SPECULATIVE, acceptance_length=1),))
    assert mean_seconds(simulate(trace(6), rejected)) > 1.5 * mean_seconds(simulate(trace(6), usual))


def test_simulation_can_end_before_the_sessions_do() -> None:
    scenario = CELL.scenario(AlwaysGreedy())
    results = simulate(trace(6), scenario)
    end = results[8].finished
    shortened = simulate(trace(6), replace(scenario, until_seconds=end))
    assert shortened == [turn for turn in results if turn.finished <= end]


def test_comparison_covers_every_static_policy_and_both_fleets_of_one_kind() -> None:
    comparison = compare(trace(6), CELL)
    assert set(comparison.static) == {
        "AlwaysGreedy",
        "AlwaysSpeculative",
        "τ = 64",
        "τ = 128",
        "τ = 512",
        "τ = 2048",
        "Sticky",
    }
    assert set(comparison.fleets) == {"greedy=2", "speculative=2"}
    for name in ("batch", "median", "mean"):
        best = min(getattr(times, name) for times in comparison.static.values())
        excess = getattr(comparison.excess, name)
        assert excess == pytest.approx(getattr(comparison.adaptive, name) / best - 1)


def comparison(adaptive: tuple[float, float], **static: tuple[float, float]) -> Comparison:
    """Batch times and medians, by policy."""
    times = {name: Times(batch, median, mean=1.0) for name, (batch, median) in static.items()}
    return Comparison(CELL, Times(*adaptive, mean=1.0), times, fleets={})


@pytest.mark.parametrize(
    ("adaptive", "static", "near"),
    [
        pytest.param(
            (102, 5.1), {"Sticky": (100, 5)}, [ADAPTIVE, "Sticky"], id="one policy is the best for both"
        ),
        pytest.param((103, 4), {"Sticky": (100, 5)}, ["Sticky"], id="the batch takes longer"),
        pytest.param((90, 5.2), {"Sticky": (100, 5)}, ["Sticky"], id="the median is higher"),
        pytest.param(
            (100, 5),
            {"Sticky": (170, 5), "AlwaysGreedy": (100, 6)},
            [ADAPTIVE],
            id="no static policy is near both",
        ),
    ],
)
def test_policies_near_the_best_in_batch_time_and_median_are_counted(
    adaptive: tuple[float, float], static: dict[str, tuple[float, float]], near: list[str]
) -> None:
    """The best batch time and the best median may be those of different static policies."""
    assert comparison(adaptive, **static).near_both(tolerance=0.02) == near


def test_frontier_has_the_policies_that_no_other_equals_in_both_times() -> None:
    static = {"a": (2.0, 5.0), "b": (1.0, 6.0), "c": (2.0, 4.0), "d": (3.0, 4.0), "e": (4.0, 1.0)}
    assert comparison((1, 1), **static).frontier == ["b", "c", "e"]


@pytest.fixture
def short_change(monkeypatch: pytest.MonkeyPatch) -> Change:
    """A change after one second. Turns are compared from the second to the third one, and sessions of three seconds."""
    for name in ("CHANGE_SECONDS", "SETTLING_SECONDS", "WINDOW_SECONDS"):
        monkeypatch.setattr(grid, name, 1.0)
    monkeypatch.setattr(grid, "STARTS_SECONDS", 3.0)
    return Change(1, pool=Pool.GREEDY, slowdown=2)


def test_same_turns_are_compared_after_a_change(short_change: Change) -> None:
    """`AlwaysGreedy` is slower, and thus has served other turns, with shorter answers, when the window begins."""
    sessions = [
        SessionTrace(id=f"s{number}", turns=[TurnLengths(prompt_tokens=400, output_tokens=10 + 10 * number)])
        for number in range(60)
    ]
    means = compare_after(sessions, CELL, (short_change,))
    assert {ADAPTIVE, "Sticky", "AlwaysGreedy"} < set(means)

    scenario = replace(CELL.scenario(Adaptive()), changes=(short_change,))
    window = [turn for turn in simulate(sessions, replace(scenario, until_seconds=3)) if turn.finished >= 2]
    assert means[ADAPTIVE] == mean_seconds(window)
    greedy = simulate(sessions, replace(scenario, policy=AlwaysGreedy()))
    same = [turn for turn in greedy if turn.session in {turn.session for turn in window}]
    assert means["AlwaysGreedy"] == pytest.approx(mean_seconds(same), rel=0.01)


def test_comparison_after_a_change_needs_sessions_until_its_end(short_change: Change) -> None:
    with pytest.raises(ValueError, match="4 sessions do not last for 3 s; use more sessions"):
        compare_after(trace(4), CELL, (short_change,))


def test_whole_run_with_a_change_has_the_sessions_that_start_in_time(short_change: Change) -> None:
    found = compare_with_change(trace(60), CELL, (short_change,))

    scenario = replace(CELL.scenario(Adaptive()), changes=(short_change,))
    started = {turn.session for turn in simulate(trace(60), replace(scenario, until_seconds=3))}
    assert 2 < len(started) < 60
    assert found.adaptive == Times.of(simulate(trace(len(started)), scenario))
    greedy = replace(scenario, policy=AlwaysGreedy())
    assert found.static["AlwaysGreedy"] == Times.of(simulate(trace(len(started)), greedy))


def test_whole_run_with_a_change_needs_sessions_that_start_later() -> None:
    with pytest.raises(ValueError, match="4 sessions do not last for 120 s; use more sessions"):
        compare_with_change(trace(4), CELL, ())


def test_times_are_means_over_the_seeds() -> None:
    first, second = (compare(trace(6), replace(CELL, seed=seed)) for seed in (0, 1))
    mean = mean_over_seeds([first, second])
    assert mean.set_up == first.set_up
    assert mean.adaptive == Times(
        *(
            (getattr(first.adaptive, name) + getattr(second.adaptive, name)) / 2
            for name in ("batch", "median", "mean")
        )
    )
    sticky = [each.static["Sticky"].median for each in (first, second)]
    assert mean.static["Sticky"].median == sum(sticky) / 2


def test_grid_has_every_combination_once() -> None:
    found = list(set_ups(["a", "b"], [1, 8], [0, 1, 2]))
    assert len(found) == len(set(found)) == 2 * 2 * 3 * 2 * 2
    assert [name for name, _ in groupby(set_up.workload for set_up in found)] == ["a", "b"]


def test_sample_is_random_and_repeatable() -> None:
    sessions = trace(50)
    assert sample(sessions, 10, seed=1) == sample(sessions, 10, seed=1) != sample(sessions, 10, seed=2)
    assert len(sample(sessions, 99, seed=1)) == 50


def test_repeated_sessions_have_different_ids() -> None:
    assert len({session.id for session in repeat(trace(3), 4)}) == 12


def test_command_prints_one_row_for_each_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "toolbench", "--concurrency", "2", "--sessions", "3", "--seed", "0", "1"]
    assert grid_cli.main(arguments) == 0
    output = capsys.readouterr()
    rows = output.out.splitlines()[2:]
    assert [row.split(" | ")[1:4] for row in rows] == [
        ["separate", "batched", "2"],
        ["separate", "serialized", "2"],
        ["common", "batched", "2"],
        ["common", "serialized", "2"],
    ]
    assert output.err.count("of 4 set-ups") == 4


@pytest.mark.parametrize(
    ("policy", "random"),
    [(AlwaysGreedy(), False), (AlwaysSpeculative(), True)],
    ids=["without drafts", "with drafts"],
)
def test_best_policy_is_repeated_with_other_drafts_accepted(
    policy: Policy, random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "STATIC_POLICIES", (policy,))
    excess = repeat_best(trace(6), CELL)
    assert [abs(time) > 0 for time in (excess.batch, excess.median, excess.mean)] == [random] * 3


def test_command_prints_the_influence_of_chance_for_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--workload", "toolbench", "--concurrency", "2", "--sessions", "3", "--seed", "0", "1"]
    assert grid_cli.main([*arguments, "--chance"]) == 0
    output = capsys.readouterr()
    rows = output.out.splitlines()[2:]
    assert [row.split(" | ")[1:5] for row in rows] == [
        [cache, speculation, "2", seed]
        for seed in ("0", "1")
        for cache in ("separate", "common")
        for speculation in ("batched", "serialized")
    ]
    assert output.err.count("of 8 set-ups") == 3


def test_command_compares_after_each_change_with_means_over_the_seeds(
    short_change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(grid_cli, "CHANGES", {"greedy engine at half speed": (2, (short_change,))})
    monkeypatch.setattr(grid_cli, "CHANGE_SESSIONS", 40)
    workload = tmp_path / "some.jsonl"
    workload.write_text("".join(session.model_dump_json() + "\n" for session in trace(20)))
    assert grid_cli.main(["--workload", str(workload), "--changes", "--seed", "0", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[1:4] for row in rows] == [
        [cache, speculation, "greedy engine at half speed"]
        for cache in ("separate", "common")
        for speculation in ("batched", "serialized")
    ]
