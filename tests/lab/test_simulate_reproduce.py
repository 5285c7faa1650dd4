"""`dps reproduce`: the runs behind each cell of the paper's tables, and the rank test."""

import math
from itertools import islice
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_lab.simulate.paper import BENCHMARKS, TABLE_1, TABLE_2, TABLE_3, benchmark_sessions, scenario
from dps_lab.simulate.rank_test import mann_whitney
from dps_lab.simulate.reproduce import RUNS, Cell, Reproduction, reproduce


@pytest.fixture(scope="module")
def small() -> tuple[Reproduction, list[str]]:
    """All tables, on the first twelve sessions of each benchmark."""
    described: list[str] = []
    sessions = {name: list(islice(benchmark_sessions(name), 12)) for name in BENCHMARKS}
    return reproduce(sessions, described.append), described


def test_every_cell_of_the_three_tables_is_simulated_once(small: tuple[Reproduction, list[str]]) -> None:
    cells = small[0].cells
    assert len({(cell.table, cell.row, cell.column) for cell in cells}) == len(cells)
    by_table = [sum(cell.table == number for cell in cells) for number in (1, 2, 3)]
    assert by_table == [3 * len(TABLE_1), 3 * len(TABLE_2), 4 * len(TABLE_3)]


def test_progress_names_every_run(small: tuple[Reproduction, list[str]]) -> None:
    assert len(small[1]) == RUNS
    assert small[1][0] == "ToolBench, DPS, c = 1, τ = 128"


def test_concurrency_8_and_table_3_are_predicted_and_not_fitted(
    small: tuple[Reproduction, list[str]],
) -> None:
    for cell in small[0].cells:
        if cell.table == 3 or cell.column == "c = 8 (s)":
            assert cell.role == "predicted"
        if cell.column in ("c = 1 (s)", "c = 4 (s)"):
            assert cell.role == "fitted"


def test_sequential_dps_with_the_papers_threshold_is_always_speculative(
    small: tuple[Reproduction, list[str]],
) -> None:
    p_values = {(each.benchmark, each.second): each.p_value for each in small[0].comparisons}
    assert p_values["ToolBench", "Always-Spec"] == pytest.approx(1, abs=0.3)
    assert all(0 <= value <= 1 for value in p_values.values())


def test_a_cell_has_no_relative_error_where_the_paper_has_zero() -> None:
    assert Cell(3, "τ = 0", "Spec %", 0.0, 0.0, "predicted").error is None
    assert Cell(2, "x", "y", 200.0, 190.0, "predicted").error == pytest.approx(-0.05)


def test_the_benchmarks_have_as_many_sessions_and_turns_as_in_the_paper() -> None:
    sizes = {}
    for name in BENCHMARKS:
        sessions = benchmark_sessions(name)
        sizes[name] = (len({session.id for session in sessions}), sum(len(s.turns) for s in sessions))
    assert sizes == {"ToolBench": (150, 592), "BFCL": (994, 4522)}


def test_only_dps_runs_on_two_engines_and_speculation_is_serialized() -> None:
    engines = {method: scenario(method, 8, 128).fleet.engines for _, method in TABLE_1}
    assert engines == {
        "Greedy": {Pool.SPECULATIVE: 0, Pool.GREEDY: 1},
        "Always-Spec": {Pool.SPECULATIVE: 1, Pool.GREEDY: 0},
        "DPS": {Pool.SPECULATIVE: 1, Pool.GREEDY: 1},
    }
    assert scenario("DPS", 8, 128).fleet.serialized


def test_mann_whitney_of_separated_samples_equals_the_value_computed_by_hand() -> None:
    """U = 0, mean 12.5, variance 5 * 5 * 11 / 12: z = 12 / 4.787 = 2.507."""
    assert mann_whitney([1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0]) == pytest.approx(
        0.01219, abs=1e-5
    )


def test_mann_whitney_corrects_the_variance_for_ties() -> None:
    """U = 2.5, mean 8; ties of 3, 2 and 2 values: variance 4 * 4 / 12 * (9 - 36 / 56) = 11.14."""
    expected = 2 * (1 - NormalDist().cdf((8 - 2.5 - 0.5) / math.sqrt(16 / 12 * (9 - 36 / 56))))
    assert mann_whitney([1.0, 2.0, 2.0, 3.0], [2.0, 3.0, 4.0, 4.0]) == pytest.approx(expected)


def test_mann_whitney_of_equal_values_is_one() -> None:
    assert mann_whitney([1.0, 1.0], [1.0, 1.0]) == 1


samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


@settings(deadline=None)
@given(samples, samples)
def test_mann_whitney_is_a_symmetric_probability(first: list[float], second: list[float]) -> None:
    p_value = mann_whitney(first, second)
    assert 0 <= p_value <= 1
    assert mann_whitney(second, first) == pytest.approx(p_value)
