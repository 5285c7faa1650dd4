"""The fleets of the demo, and its conclusion."""

from dps_lab.fleets import FLEETS, conclusion
from dps_lab.replay.records import ReplayResult, TurnRecord, Usage, Verdict
from dps_lab.replay.report import Summary, summarize
from dps_lab.replay.tables import fleets_table


def run(label: str, batch: float, session: float) -> Summary:
    turn = TurnRecord(
        "s", 1, "http://a/v1", 200, Verdict("greedy", "fixed"), 1, 0, 0.0, 0.1, session, Usage(9, 3, 6)
    )
    return summarize(ReplayResult(label, 1, batch, [turn]))


def test_every_fleet_has_two_engines_and_a_name_of_its_own() -> None:
    assert {sum(fleet.engines.values()) for fleet in FLEETS} == {2}
    assert len({fleet.label for fleet in FLEETS}) == len(FLEETS)


def test_conclusion_names_the_fastest_fleet_by_each_measure() -> None:
    assert conclusion([run("a", 12.0, 1.5), run("b", 10.04, 1.6), run("c", 10.3, 1.25)]) == [
        "shortest batch time: b (10.04 s); c (10.30 s)",
        "lowest median session latency: c (1.25 s)",
    ]


def test_table_has_one_row_for_each_fleet() -> None:
    table = fleets_table([run("a", 12.0, 1.5)], "title")
    assert [list(column.cells) for column in table.columns] == [
        ["a"],
        ["12.0 s"],
        ["1.50 s"],
        ["1.50 s"],
        ["67%"],
        ["0%"],
    ]
