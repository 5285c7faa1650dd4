"""`dps reproduce`: the runs behind each value of the paper's tables, and the rank test."""

import math
from itertools import islice
from pathlib import Path
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_lab.paper.cli import main
from dps_lab.paper.further_results import without_prefix_cache
from dps_lab.paper.plots import draw_reproduction
from dps_lab.paper.published import BENCHMARKS, TABLE_1, TABLE_2, TABLE_3, benchmark_sessions, scenario
from dps_lab.paper.rank_test import mann_whitney
from dps_lab.paper.reproduce import RUNS, Reproduction, reproduce
from dps_lab.paper.value import PaperValue


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


def test_further_results_have_the_papers_values(small: tuple[Reproduction, list[str]]) -> None:
    papers = {(c.table, c.row, c.column): c.paper for c in small[0].cells if c.table > 3}
    assert papers == {
        (4, "L-switch, τ = 6144", "Med (s)"): 2.842,
        (4, "L-switch, τ = 6144", "Spec %"): 99.7,
        (4, "DPS, τ = 8192", "Med (s)"): 2.886,
        (5, "ToolBench, ΔL", "shortest"): 58,
        (5, "ToolBench, ΔL", "longest"): 4026,
        (5, "ToolBench, L", "shortest"): 808,
        (5, "ToolBench, L", "longest"): 8192,
        (5, "ToolBench", "sessions"): 150,
        (5, "ToolBench", "turns"): 592,
        (5, "BFCL", "sessions"): 994,
        (5, "BFCL", "turns"): 4522,
        (6, "ToolBench, D: Transformers", "Med (s)"): 18.928,
        (6, "ToolBench, D: Transformers", "p95 (s)"): 36.363,
        (6, "ToolBench, D: Transformers", "TPS"): 29.8,
        (6, "ToolBench, E: vLLM", "Med (s)"): 4.455,
        (6, "ToolBench, E: vLLM", "p95 (s)"): 8.895,
        (6, "ToolBench, E: vLLM", "TPS"): 123.6,
        (6, "BFCL, D: Transformers", "Med (s)"): 7.752,
        (6, "BFCL, D: Transformers", "p95 (s)"): 15.246,
        (6, "BFCL, D: Transformers", "TPS"): 13.6,
        (6, "BFCL, E: vLLM", "Med (s)"): 1.106,
        (6, "BFCL, E: vLLM", "p95 (s)"): 2.702,
        (6, "BFCL, E: vLLM", "TPS"): 87.0,
        (6, "ToolBench, DPS on vLLM, τ = 8192 against 256, greedy pass + 5.3 ms", "Med, gap %"): 3.03,
        (6, "ToolBench, DPS on vLLM, τ = 8192 against 256, greedy pass + 2.2 ms", "Med, gap %"): 3.03,
    }


def test_an_engine_without_prefix_cache_computes_every_prompt_and_keeps_the_sessions() -> None:
    sessions = benchmark_sessions("ToolBench")[:5]
    results = without_prefix_cache(sessions, scenario("Greedy", 1, None))
    assert {result.session for result in results} == {session.id for session in sessions}
    assert all(result.cached_tokens == 0 for result in results)
    lengths = [turn.prompt_tokens for session in sessions for turn in session.turns]
    assert [result.prompt_tokens for result in results] == lengths


def test_plots_are_png_files(small: tuple[Reproduction, list[str]], tmp_path: Path) -> None:
    sessions = {name: list(islice(benchmark_sessions(name), 12)) for name in BENCHMARKS}
    draw_reproduction(small[0].cells, sessions, tmp_path / "plots")
    written = sorted((tmp_path / "plots").iterdir())
    assert [path.name for path in written] == ["concurrency.png", "lengths.png", "threshold.png"]
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in written)


def test_a_folder_that_cannot_be_created_is_reported_before_the_simulations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit) as caught:
        main(["--plots", str(file)])
    assert caught.value.code == 2
    assert (
        f"--plots {file}: the folder cannot be created (File exists); choose another one"
        in capsys.readouterr().err
    )


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
    assert PaperValue(3, "τ = 0", "Spec %", 0.0, 0.0, "predicted").error is None
    assert PaperValue(2, "x", "y", 200.0, 190.0, "predicted").error == pytest.approx(-0.05)


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


@given(samples, samples)
def test_mann_whitney_is_a_symmetric_probability(first: list[float], second: list[float]) -> None:
    p_value = mann_whitney(first, second)
    assert 0 <= p_value <= 1
    assert mann_whitney(second, first) == pytest.approx(p_value)
