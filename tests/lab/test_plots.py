"""The demo's plot is a PNG file, whatever the data."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from dps_lab.fleets import FLEETS
from dps_lab.plots import DemoPlot, Outage, draw_demo
from dps_lab.replay.records import ReplayResult, TurnRecord, Usage, Verdict

URLS = ["http://a/v1", "http://b/v1"]


def run(label: str, turns: int) -> ReplayResult:
    records = [
        TurnRecord(
            session=f"s{index // 3}",
            turn=index % 3 + 1,
            url=URLS[index % 2],
            status=200,
            verdict=Verdict(("speculative", "greedy")[index % 2], "fixed", 30 * index, 1000, index % 3 + 1),
            attempts=1,
            unacknowledged=0,
            started=index / 10,
            ttft=0.1,
            latency=0.3,
            usage=Usage(1000, 20, 900),
        )
        for index in range(turns)
    ]
    return ReplayResult(label, turns, turns / 10 + 0.3, records)


PLOT = DemoPlot(
    runs=[run(fleet.label, 30) for fleet in FLEETS],
    faulted=run("rule", 30),
    threshold_tokens=128,
    time_scale=2.0,
    urls=URLS,
    outage=Outage(URLS[1], 1.0, 2.0),
    subtitle="synthetic",
)


@pytest.mark.parametrize(
    "plot",
    [
        pytest.param(PLOT, id="outage"),
        pytest.param(replace(PLOT, outage=None), id="no outage"),
        pytest.param(
            replace(PLOT, runs=[run("none", 0) for _ in FLEETS], faulted=run("none", 0)),
            id="no turn answered",
        ),
        pytest.param(replace(PLOT, threshold_tokens=0), id="no turn speculates"),
    ],
)
def test_demo_plot_is_a_png(plot: DemoPlot, tmp_path: Path) -> None:
    draw_demo(plot, tmp_path / "folder" / "demo.png")
    image = (tmp_path / "folder" / "demo.png").read_bytes()
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", image[16:24]) == (1725, 1140)
