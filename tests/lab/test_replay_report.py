"""Statistics of a replay, and its comparison with the oracle."""

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from dps_lab.replay.oracle import Decision
from dps_lab.replay.records import ReplayResult, Usage, Verdict
from dps_lab.replay.report import Comparison, compare, print_summary
from tests.lab.turns import answered

SPECULATIVE = Verdict("speculative", "within_threshold", 20, 120, 2, "grown", "redis")


def test_summary_has_routes_lengths_latency_and_losses() -> None:
    failed: dict[str, Any] = {"status": None, "ttft": None, "usage": Usage(), "error": "gone"}
    lost = answered("b", 2, Verdict(), latency=9.0, attempts=12, **failed)
    turns = [answered("a", 1), replace(answered("a", 2, SPECULATIVE), attempts=3), answered("b", 1), lost]
    printed = io.StringIO()
    print_summary(ReplayResult(5, 10.0, turns), Console(file=printed, width=100))
    rows = [
        re.split(r"\s{2,}", line.strip()) for line in printed.getvalue().splitlines() if line.startswith("  ")
    ]
    assert [row for row in rows if len(row) > 1] == [
        ["pool", "reason", "turns", "share"],
        ["speculative", "within_threshold", "1", "33.3%"],
        ["greedy", "over_threshold", "2", "66.7%"],
        ["min", "p25", "median", "p75", "p95", "max"],
        ["ΔL", "20", "60", "100", "100", "100", "100"],
        ["L", "100", "100", "100", "110", "118", "120"],
        ["sessions", "2"],
        ["turns", "5"],
        ["session latency, median", "2.000 s"],
        ["session latency, p95", "2.000 s"],
        ["time to first token, median", "0.500 s"],
        ["time to first token, p95", "0.500 s"],
        ["prompt tokens cached", "25.0%"],
        ["generated tokens per second", "3.0"],
        ["duration of the run", "10.0 s"],
        ["client retries", "13"],
        ["turns lost", "2"],  # the one without an answer, and its successor, which was not sent
    ]


TRUTH = {"a": [Decision("greedy", 100, 100, 1), Decision("speculative", 20, 120, 2)]}
REPEATED = replace(SPECULATIVE, delta_tokens=0)


@pytest.mark.parametrize(
    ("verdict", "unacknowledged", "kind"),
    [
        (SPECULATIVE, 0, "same"),
        (SPECULATIVE, 1, "same"),
        (Verdict(), 0, "undecided"),
        (replace(SPECULATIVE, pool="greedy"), 0, "differing"),
        (replace(SPECULATIVE, delta_tokens=21), 0, "differing"),
        (replace(SPECULATIVE, prompt_tokens=121), 0, "differing"),
        (replace(SPECULATIVE, turn=3), 0, "differing"),
        (REPEATED, 0, "differing"),  # there was no retry, so this ΔL is wrong
        (REPEATED, 1, "repeated"),
        (replace(REPEATED, prompt_tokens=121), 1, "differing"),
    ],
)
def test_decision_is_compared_with_the_oracle(verdict: Verdict, unacknowledged: int, kind: str) -> None:
    turn = replace(answered("a", 2, verdict), unacknowledged=unacknowledged)
    pair = [(turn, TRUTH["a"][1])]
    assert compare([turn], TRUTH) == Comparison(
        same=int(kind == "same"),
        repeated=pair if kind == "repeated" else [],
        differing=pair if kind == "differing" else [],
    )
