"""Continuous batching in virtual time."""

import random
from collections.abc import Iterator
from collections.abc import Sequence as Many
from itertools import islice

import pytest

from dps_local.emulated_sglang.generation import Plan
from dps_local.emulated_sglang.scheduler import ABORTED, Scheduler, Sequence, StepKind
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, TimeModel

STANDALONE = SPECULATION_DEFAULTS["STANDALONE"]
GREEDY = TimeModel()
SPECULATIVE = TimeModel(speculation=STANDALONE)
DONE = {"type": "length", "length": 0}


def sequence(rid: str, prompt: Many[int], answer: int = 20) -> Sequence:
    tokens = tuple(range(1000, 1000 + answer))
    plan = Plan(tokens, "x" * answer, tuple(range(1, answer + 1)), DONE)
    return Sequence(rid, tuple(prompt), plan, 0.0, random.Random(rid))


def distinct(count: int, prompt_tokens: int = 200) -> list[Sequence]:
    return [sequence(f"r{i}", range(i * 10_000, i * 10_000 + prompt_tokens)) for i in range(count)]


def run(scheduler: Scheduler, sequences: Many[Sequence]) -> float:
    """Run all sequences from time 0. Returns the time at which the last one finishes."""
    now = 0.0
    for each in sequences:
        scheduler.submit(each)
    while step := scheduler.next_step(now):
        now += step.seconds
        scheduler.complete(step, now)
    return now


def closed_loop(scheduler: Scheduler, turns: Iterator[Sequence], concurrency: int) -> float:
    """Run all sequences, each when an earlier one finishes. Returns the time at which the last one finishes."""
    now = 0.0
    for turn in islice(turns, concurrency):
        scheduler.submit(turn)
    while step := scheduler.next_step(now):
        now += step.seconds
        done = sum(each.finished is not None for each in scheduler.complete(step, now))
        for turn in islice(turns, done):
            scheduler.submit(turn)
    return now


def scheduler(
    time_model: TimeModel = GREEDY, capacity: int = 100_000, max_running: int = 64, serialized: bool = False
) -> Scheduler:
    return Scheduler(time_model, capacity, max_running, serialized)


def test_serialized_speculation_takes_as_long_as_sequential_requests() -> None:
    alone = run(scheduler(SPECULATIVE, serialized=True), distinct(1))
    for concurrency in (4, 8):
        together = run(scheduler(SPECULATIVE, serialized=True), distinct(concurrency))
        assert together == pytest.approx(concurrency * alone, rel=0.1)


@pytest.mark.parametrize(
    ("engine", "concurrency", "paper"),
    [
        ("greedy", 1, 1060.5),
        ("greedy", 4, 330.6),
        ("greedy", 8, 200.9),
        ("always-spec", 1, 838.0),
        ("always-spec", 4, 845.0),
        ("always-spec", 8, 847.5),
    ],
)
def test_bfcl_durations_match_the_papers_table_2(engine: str, concurrency: int, paper: float) -> None:
    """1% of the 4,522 turns is simulated, each with 200 uncached prompt tokens and 25 answer tokens.

    25 tokens follow from Table 1: 107 tokens/s for 1060 s, divided by 4,522 turns.
    """
    model = GREEDY if engine == "greedy" else SPECULATIVE
    turns = iter([sequence(f"r{i}", range(i * 10_000, i * 10_000 + 200), 25) for i in range(45)])
    seconds = closed_loop(scheduler(model, serialized=model is SPECULATIVE), turns, concurrency)
    assert seconds * 4522 / 45 == pytest.approx(paper, rel=0.15)


def test_speculation_speeds_up_one_request_but_not_eight_serialized_ones() -> None:
    assert run(scheduler(SPECULATIVE, serialized=True), distinct(1)) < run(scheduler(), distinct(1))
    assert run(scheduler(SPECULATIVE, serialized=True), distinct(8)) > run(scheduler(), distinct(8))


def test_acceptance_has_the_configured_mean_and_does_not_exceed_the_draft() -> None:
    long = sequence("r", range(10), answer=5001)
    run(scheduler(SPECULATIVE), [long])

    assert 1 + long.accepted_drafts / long.verify_steps == pytest.approx(
        STANDALONE.acceptance_length, rel=0.02
    )
    assert len(long.accepted) == STANDALONE.draft_tokens
    assert sum(long.accepted) == long.verify_steps


def test_second_turn_finds_prompt_and_answer_cached_except_the_last_token() -> None:
    engine = scheduler()
    first = sequence("first", range(100))
    run(engine, [first])
    second = sequence("second", [*first.prompt, *first.plan.token_ids, 7, 8, 9])
    run(engine, [second])

    assert (first.cached_tokens, second.cached_tokens) == (0, 100 + 20 - 1)


def test_repeated_prompt_is_cached_except_its_last_token() -> None:
    engine = scheduler()
    again = sequence("again", range(100))
    run(engine, [sequence("once", range(100))])
    run(engine, [again])

    assert again.cached_tokens == 99


def test_prefill_takes_precedence_over_decode() -> None:
    engine = scheduler()
    kinds = []
    engine.submit(sequence("a", range(10)))
    for rid in ("b", None):
        step = engine.next_step(0.0)
        assert step is not None
        kinds.append((step.kind, [each.rid for each in step.sequences]))
        if rid:
            engine.submit(sequence(rid, range(50, 60)))
        engine.complete(step, 0.0)
    step = engine.next_step(0.0)
    assert step is not None
    kinds.append((step.kind, [each.rid for each in step.sequences]))

    assert kinds == [
        (StepKind.PREFILL, ["a"]),
        (StepKind.PREFILL, ["b"]),
        (StepKind.DECODE, ["a", "b"]),
    ]


def test_running_requests_are_limited() -> None:
    engine = scheduler(max_running=2)
    for each in distinct(3):
        engine.submit(each)
    step = engine.next_step(0.0)

    assert step is not None
    assert [each.rid for each in step.sequences] == ["r0", "r1"]
    assert [each.rid for each in engine.waiting] == ["r2"]


def test_request_waits_for_cache_space_and_evicts_old_entries() -> None:
    engine = scheduler(capacity=500)
    requests = distinct(4)
    run(engine, requests)

    assert all(each.finish_reason == DONE for each in requests)
    assert engine.cache.size <= 500
    assert engine.used_tokens == 0


def test_request_larger_than_the_cache_is_rejected() -> None:
    with pytest.raises(ValueError, match="KV memory budget: input_len=200"):
        scheduler(capacity=219).submit(distinct(1)[0])


@pytest.mark.parametrize("steps", [0, 1, 5], ids=["waiting", "prefilled", "decoding"])
def test_aborted_request_frees_its_tokens(steps: int) -> None:
    engine = scheduler()
    request = distinct(1)[0]
    engine.submit(request)
    for _ in range(steps):
        step = engine.next_step(0.0)
        assert step is not None
        engine.complete(step, 0.0)

    assert engine.abort(request.rid, 1.0) is request
    assert request.finish_reason == ABORTED
    assert request.generated == steps
    assert (engine.running, engine.waiting, engine.used_tokens) == (0, (), 0)
    assert engine.next_step(1.0) is None
    assert engine.abort(request.rid, 1.0) is None


def test_request_aborted_during_a_step_receives_no_token() -> None:
    engine = scheduler()
    request = distinct(1)[0]
    engine.submit(request)
    step = engine.next_step(0.0)
    assert step is not None
    engine.abort(request.rid, 0.0)

    assert engine.complete(step, 1.0) == ()
    assert request.generated == 0


def test_cache_is_flushed_only_when_idle() -> None:
    engine = scheduler()
    first, second = distinct(2)
    engine.submit(first)
    assert not engine.flush()
    run(engine, [second])

    assert engine.flush()
    assert engine.cache.size == 0
