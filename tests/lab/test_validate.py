"""Replays as traces, and the simulation of runs on emulated engines."""

import pytest

from dps_lab.replay.records import ReplayResult, TurnRecord, Usage, Verdict
from dps_lab.simulate.trace import SessionTrace, TurnLengths
from dps_lab.validate.runs import ValidationRun, lengths, scaled, simulated

PROMPT = tuple(range(110))


def turn(session: str, number: int, started: float, prompt: int, output: int) -> TurnRecord:
    return TurnRecord(
        session=session,
        turn=number,
        url="http://a/v1",
        status=200,
        verdict=Verdict(),
        attempts=1,
        unacknowledged=0,
        started=started,
        ttft=0.1,
        latency=0.2,
        usage=Usage(prompt, output),
    )


def trace(session: str, *turns: tuple[int, int]) -> SessionTrace:
    lengths = [TurnLengths(prompt_tokens=prompt, output_tokens=output) for prompt, output in turns]
    return SessionTrace(id=session, turns=lengths)


def test_trace_has_the_reported_lengths_in_the_order_in_which_sessions_began() -> None:
    records = [turn("b", 1, 0.2, 40, 5), turn("a", 1, 0.1, 100, 10), turn("a", 2, 0.5, 130, 20)]
    assert lengths(ReplayResult("", 3, 1.0, records)) == [
        trace("a", (100, 10), (130, 20)),
        trace("b", (40, 5)),
    ]


@pytest.mark.parametrize("speed", [1.0, 0.25])
def test_simulated_engine_has_the_cost_model_of_the_emulated_one(speed: float) -> None:
    run = ValidationRun("bfcl", "AlwaysGreedy", "separate", 1, 1)
    report = simulated(run, [trace("s", (110, 3))], {"s": PROMPT}, speed)
    request, prefill, decode = 0.006, 0.0081 + 110 / 11_000, 0.0081 + 0.00012
    assert report.batch_seconds == pytest.approx(request + (prefill + 2 * decode) / speed)


def test_times_are_scaled() -> None:
    report = simulated(
        ValidationRun("bfcl", "AlwaysGreedy", "common", 1, 1), [trace("s", (110, 3))], {"s": PROMPT}, 1.0
    )
    twice = scaled(report, 2.0)
    assert [twice.batch_seconds, twice.session_seconds.median, twice.session_seconds.p95] == [
        2 * report.batch_seconds,
        2 * report.session_seconds.median,
        2 * report.session_seconds.p95,
    ]


def test_sessions_share_the_prefixes_that_their_first_prompts_have_in_common() -> None:
    first_prompts = {"a": PROMPT, "b": PROMPT[:66] + (999,) * 44}
    run = ValidationRun("bfcl", "AlwaysGreedy", "separate", 1, 2)
    traces = [trace("a", (110, 1)), trace("b", (110, 1))]
    uncached = 110 + 44
    report = simulated(run, traces, first_prompts, 1.0)
    assert report.batch_seconds == pytest.approx(2 * (0.006 + 0.0081) + uncached / 11_000)
