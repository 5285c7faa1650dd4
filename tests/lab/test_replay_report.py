"""Statistics of a replay, and its comparison with the oracle."""

from dataclasses import replace
from typing import Any

import pytest

from dps_lab.replay.oracle import Decision
from dps_lab.replay.records import ReplayResult, Usage, Verdict
from dps_lab.replay.report import Comparison, Summary, compare, summarize
from tests.lab.turns import answered

SPECULATIVE = Verdict("speculative", "within_threshold", 20, 120, 2, "grown", "redis")


def test_summary_has_routes_lengths_latency_and_losses() -> None:
    failed: dict[str, Any] = {"status": None, "ttft": None, "usage": Usage(), "error": "gone"}
    lost = answered("b", 2, Verdict(), latency=9.0, attempts=12, **failed)
    turns = [answered("a", 1), replace(answered("a", 2, SPECULATIVE), attempts=3), answered("b", 1), lost]
    assert summarize(ReplayResult(5, 10.0, turns)) == Summary(
        sessions=2,
        turns=5,
        lost=2,  # the one without an answer, and its successor, which was not sent
        retries=13,
        wall_seconds=10.0,
        routes={("greedy", "over_threshold"): 2, ("speculative", "within_threshold"): 1},
        delta_tokens=[20, 100, 100],
        prompt_tokens=[100, 100, 120],
        session_seconds=[2.0],
        first_token_seconds=[0.5, 0.5, 0.5],
        tokens_per_second=3.0,
        cached_share=0.25,
    )


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
