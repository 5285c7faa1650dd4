"""Statistics of a replay, and its comparison with the oracle."""

from dataclasses import replace

import pytest

from dps_lab.replay.oracle import Decision
from dps_lab.replay.records import ReplayResult, TurnRecord, Usage, Verdict
from dps_lab.replay.report import Comparison, Quantiles, Summary, compare, summarize

SPECULATIVE = Verdict("speculative", "within_threshold", 20, 120, 2, "grown", "redis")
GREEDY = Verdict("greedy", "over_threshold", 100, 100, 1, "new", "redis")


def record(session: str, turn: int, verdict: Verdict = GREEDY, latency: float = 1.0) -> TurnRecord:
    return TurnRecord(
        session=session,
        turn=turn,
        url="http://a/v1",
        status=200,
        verdict=verdict,
        attempts=1,
        unacknowledged=0,
        started=0.0,
        ttft=latency / 2,
        latency=latency,
        usage=Usage(prompt_tokens=100, completion_tokens=10, cached_tokens=25),
    )


def one(value: float, count: int = 1) -> Quantiles:
    return Quantiles(count, value, value, value, value, value, value)


def test_summary_has_routes_lengths_latency_and_losses() -> None:
    lost = replace(
        record("b", 2, Verdict(), 9.0), status=None, ttft=None, attempts=12, usage=Usage(), error="gone"
    )
    turns = [record("a", 1), replace(record("a", 2, SPECULATIVE), attempts=3), record("b", 1), lost]
    assert summarize(ReplayResult("run", 5, 10.0, turns), time_scale=2.0) == Summary(
        label="run",
        sessions=2,
        turns=5,
        lost=2,  # the one without an answer, and its successor, which was not sent
        retries=13,
        wall_seconds=20.0,
        routes={("greedy", "over_threshold"): 2, ("speculative", "within_threshold"): 1},
        histories={"new": 2, "grown": 1},
        states={"redis": 3},
        delta_tokens=Quantiles.of([100, 20, 100]),
        prompt_tokens=Quantiles.of([100, 120, 100]),
        session_latency=one(4.0),
        ttft=one(1.0, count=3),
        completion_tokens=30,
        tokens_per_second=1.5,
        cached_share=0.25,
    )
    assert summarize(ReplayResult("run", 5, 10.0, turns)).speculative_share == pytest.approx(1 / 3)


def test_replay_without_decision_headers_has_no_routes() -> None:
    summary = summarize(ReplayResult("plain", 1, 1.0, [record("a", 1, Verdict())]))
    assert (summary.routes, summary.delta_tokens, summary.speculative_share, summary.lost) == (
        {},
        None,
        0.0,
        0,
    )


def test_quantiles_are_interpolated() -> None:
    assert Quantiles.of([]) is None
    assert Quantiles.of([7]) == one(7)
    assert Quantiles.of(range(101)) == Quantiles(101, 0, 25, 50, 75, 95, 100)


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
    turn = replace(record("a", 2, verdict), unacknowledged=unacknowledged)
    pair = [(turn, TRUTH["a"][1])]
    assert compare([turn], TRUTH) == Comparison(
        same=int(kind == "same"),
        repeated=pair if kind == "repeated" else [],
        differing=pair if kind == "differing" else [],
    )
