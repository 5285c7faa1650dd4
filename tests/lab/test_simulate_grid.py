"""Changes during a simulation, and the comparison of Adaptive with other policies and fleets."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import pytest

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import AlwaysGreedy, AlwaysSpeculative
from dps_lab.simulate import grid, grid_cli
from dps_lab.simulate.grid import Cell, Times, cells, compare, compare_after, mean_over_seeds, repeat, sample
from dps_lab.simulate.run import Change, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace, TurnLengths

CELL = Cell("some", concurrency=2, cache="separate", serialized=False, seed=0)


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


def test_comparison_after_a_change_needs_sessions_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHANGE_SECONDS", "SETTLING_SECONDS", "WINDOW_SECONDS"):
        monkeypatch.setattr(grid, name, 1.0)
    changes = (Change(1, pool=Pool.GREEDY, slowdown=2),)
    means = compare_after(trace(40), CELL, changes)
    assert {"Adaptive", "Sticky", "AlwaysGreedy"} < set(means)
    with pytest.raises(ValueError, match="4 sessions do not last for 3 s; give more sessions"):
        compare_after(trace(4), CELL, changes)


def test_times_are_means_over_the_seeds() -> None:
    first, second = (compare(trace(6), replace(CELL, seed=seed)) for seed in (0, 1))
    mean = mean_over_seeds([first, second])
    assert mean.cell == first.cell
    assert mean.adaptive == Times(
        *(
            (getattr(first.adaptive, name) + getattr(second.adaptive, name)) / 2
            for name in ("batch", "median", "mean")
        )
    )
    sticky = [each.static["Sticky"].median for each in (first, second)]
    assert mean.static["Sticky"].median == sum(sticky) / 2


def test_grid_has_every_combination_once() -> None:
    found = list(cells(["a", "b"], [1, 8], [0, 1, 2]))
    assert len(found) == len(set(found)) == 2 * 2 * 3 * 2 * 2
    assert [name for name, _ in groupby(cell.workload for cell in found)] == ["a", "b"]


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
    assert output.err.count("of 4 set-ups") == 3
