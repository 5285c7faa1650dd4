"""`dps reproduce`: the runs behind each value of the paper's tables."""

from itertools import islice

import pytest

from dps_gateway.pool import Pool
from dps_lab.paper.published import BENCHMARKS, TABLE_1, TABLE_2, TABLE_3, benchmark_sessions, scenario
from dps_lab.paper.reproduce import PaperValue, reproduce


@pytest.fixture(scope="module")
def small() -> tuple[list[PaperValue], list[str]]:
    """All tables, on the first twelve sessions of each benchmark."""
    described: list[str] = []
    sessions = {name: list(islice(benchmark_sessions(name), 12)) for name in BENCHMARKS}
    return list(reproduce(sessions, described.append)), described


def test_every_cell_of_the_three_tables_is_simulated_once(small: tuple[list[PaperValue], list[str]]) -> None:
    cells = small[0]
    assert len({(cell.table, cell.row, cell.column) for cell in cells}) == len(cells)
    by_table = [sum(cell.table == number for cell in cells) for number in (1, 2, 3)]
    assert by_table == [3 * len(TABLE_1), 3 * len(TABLE_2), 4 * len(TABLE_3)]


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
