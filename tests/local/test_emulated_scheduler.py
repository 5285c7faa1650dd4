"""Continuous batching in virtual time."""

import random
from collections.abc import Iterator
from collections.abc import Sequence as Many
from itertools import islice

import pytest

from dps_local.emulated_sglang.generation import Plan
from dps_local.emulated_sglang.scheduler import Scheduler, Sequence
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


def test_acceptance_has_the_configured_mean_and_does_not_exceed_the_draft() -> None:
    long = sequence("r", range(10), answer=5001)
    run(scheduler(SPECULATIVE), [long])

    assert 1 + long.accepted_drafts / long.verify_steps == pytest.approx(
        STANDALONE.acceptance_length, rel=0.02
    )
    assert len(long.accepted) == STANDALONE.draft_tokens
    assert sum(long.accepted) == long.verify_steps


def test_request_waits_for_cache_space_and_evicts_old_entries() -> None:
    engine = scheduler(capacity=500)
    requests = distinct(4)
    run(engine, requests)

    assert all(each.finish_reason == DONE for each in requests)
    assert engine.cache.size <= 500
    assert engine.used_tokens == 0
