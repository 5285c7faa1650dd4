"""The demo's plot is a PNG file, whatever the data."""

from pathlib import Path

import pytest

from dps_lab.plots import Outage, draw_demo
from dps_lab.replay.records import ReplayResult, Verdict
from dps_lab.simulate.compare import compare
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.trace import SessionTrace, TurnLengths
from tests.lab.turns import answered

URLS = ["http://a/v1", "http://b/v1"]


def run(turns: int) -> ReplayResult:
    records = [
        answered(
            f"s{index // 3}",
            index % 3 + 1,
            Verdict(("speculative", "greedy")[index % 2], "fixed", 30 * index, 1000, index % 3 + 1),
            url=URLS[index % 2],
            started=index / 10,
        )
        for index in range(turns)
    ]
    return ReplayResult(turns, turns / 10 + 0.3, records)


@pytest.mark.parametrize(
    ("turns", "outage"),
    [
        pytest.param(30, Outage(URLS[1], 1.0, 2.0), id="outage"),
        pytest.param(30, None, id="no outage"),
        pytest.param(0, None, id="no turn answered"),
    ],
)
def test_demo_plot_is_a_png(turns: int, outage: Outage | None, tmp_path: Path) -> None:
    sessions = [SessionTrace(id="s", turns=[TurnLengths(prompt_tokens=50, output_tokens=5)])]
    results = compare(lambda seed: sessions, FleetSpec({}), 128, (1, 4))
    draw_demo(
        {"batched": results, "serialized": results}, run(turns), outage, tmp_path / "folder" / "demo.png"
    )
    assert (tmp_path / "folder" / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
