"""Measures a running engine: which requests are sent, and the parameters of the time model that follow from them.

This module performs no I/O; requests are sent by a `Probe`.
"""

import math
import random
import statistics
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from dps_gateway.pool import Pool
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.measured_timing import PassTimes

SERIALIZED_BELOW: Final = 1.5
"""If the mean batch of requests that are sent together is smaller, the engine serves one request at a time."""

TOKENS_PER_WORD: Final = 3
"""Upper estimate of the tokens per word in the bundled sessions."""

FEWEST_STEPS: Final = 16
"""Minimum number of decode steps, over all answers."""

PREFILL_ROUNDS: Final = 3
"""Maximum number of times that a plan's prompts are sent, if the load of other clients hides the time of prefill."""


class MeasurementError(Exception):
    """An engine cannot be measured. The message says what to change."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer. Times are in seconds on one clock, lengths in tokens.

    chunks: when each part of the answer arrived. A decode step sends one part, which has several tokens if drafts
    were accepted.
    """

    sent: float
    chunks: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def uncached_tokens(self) -> int:
        """The part of the prompt that the engine has computed."""
        return self.prompt_tokens - self.cached_tokens


class Probe(Protocol):
    """Sends requests to one engine."""

    async def answers(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        """Send all prompts at the same time, and wait for all answers. Raises MeasurementError."""


@dataclass(frozen=True)
class Plan:
    """The requests that are sent to each engine.

    prompt_words: lengths of the prompts with which prefill is measured. repeats: how often each length is sent.
    batches: numbers of requests that decode at the same time. waves: how often each number is sent.
    answer_tokens: longest answer when decoding is measured.
    """

    prompt_words: tuple[int, ...] = (100, 800, 3200)
    repeats: int = 3
    batches: tuple[int, ...] = (1, 4, 16)
    waves: int = 2
    answer_tokens: int = 128

    def within(self, context_tokens: int) -> "Plan":
        """The plan for an engine with this context length, whose longest prompt takes at most half of it."""
        longest = context_tokens // (2 * TOKENS_PER_WORD)
        return replace(self, prompt_words=tuple(min(count, longest) for count in self.prompt_words))

    @property
    def requests(self) -> int:
        """Minimum number of requests, including the first, which is not measured."""
        return 1 + self.repeats * len(self.prompt_words) + self.waves * sum(self.batches)


@dataclass(frozen=True)
class EngineMeasurement:
    """What was measured on one engine, or the mean of several.

    request_seconds: time that a request spends outside the passes. acceptance_length: mean tokens per decode step.
    serialized: whether the engine serves one request at a time.
    """

    passes: PassTimes
    request_seconds: float
    acceptance_length: float
    serialized: bool

    @classmethod
    def mean(cls, engines: Sequence["EngineMeasurement"]) -> "EngineMeasurement":
        """The mean of the engines of a pool; serialized if one of them is."""

        def mean(values: Iterator[float]) -> float:
            return statistics.fmean(values)

        return cls(
            passes=PassTimes(
                mean(each.passes.prefill_base_seconds for each in engines),
                mean(each.passes.prefill_seconds_per_token for each in engines),
                mean(each.passes.decode_base_seconds for each in engines),
                mean(each.passes.decode_seconds_per_request for each in engines),
            ),
            request_seconds=mean(each.request_seconds for each in engines),
            acceptance_length=mean(each.acceptance_length for each in engines),
            serialized=any(each.serialized for each in engines),
        )


def measured_fleet(
    fleet: FleetSpec, pools: Mapping[Pool, EngineMeasurement], acceptance_length: float | None
) -> FleetSpec:
    """The fleet with the measured engines. acceptance_length: used instead of the measured one, unless None."""
    speculative = pools[Pool.SPECULATIVE]
    accepted = speculative.acceptance_length if acceptance_length is None else acceptance_length
    drafted = max(fleet.speculation.draft_tokens, math.ceil(accepted))
    return replace(
        fleet,
        measured={pool: each.passes for pool, each in pools.items()},
        speculation=replace(fleet.speculation, acceptance_length=accepted, draft_tokens=drafted),
        serialized=fleet.serialized or speculative.serialized,
        efficiency=replace(
            fleet.efficiency,
            request_seconds=statistics.fmean(each.request_seconds for each in pools.values()),
        ),
    )


async def measure(probe: Probe, chats: Sequence[str], plan: Plan) -> EngineMeasurement:
    """Send the plan's requests, and fit the engine's parameters.

    chats: prompts that resemble real ones, because acceptance depends on the text. Raises MeasurementError.
    """
    words = sorted({word for chat in chats for word in chat.split()})
    rng = random.Random(0)
    await probe.answers([_new_text(words, plan.prompt_words[0], rng)], 1)
    prefills: list[list[Answer]] = [[] for _ in plan.prompt_words]
    for _ in range(PREFILL_ROUNDS):
        for group, count in zip(prefills, plan.prompt_words, strict=True):
            for _ in range(plan.repeats):
                group += await probe.answers([_new_text(words, count, rng)], 1)
        if _prefill_line(prefills)[1] > 0:
            break
    waves = [
        await probe.answers(rng.choices(chats, k=batch), plan.answer_tokens)
        for batch in plan.batches
        for _ in range(plan.waves)
    ]
    return fit(prefills, waves)


def fit(prefills: Sequence[Sequence[Answer]], waves: Sequence[Sequence[Answer]]) -> EngineMeasurement:
    """The parameters of an engine.

    prefills: answers of one token to prompts that were sent one by one; of those in one group, whose prompts have about
    the same length, the fastest counts, because load of other clients delays the others. waves: answers to prompts that
    were sent together.

    Raises MeasurementError if the answers were too short, or the longer prompts took no longer than the short ones.
    """
    decoded = [span for span in map(_decoding, waves) if span is not None]
    steps = sum(each.steps for each in decoded)
    if steps < FEWEST_STEPS:
        raise MeasurementError(
            f"its answers had only {steps} decode steps; check that it streams, and that its answers are not empty"
        )
    decode_base, decode_slope = line(
        [(each.batch, each.seconds / each.steps, each.steps) for each in decoded]
    )
    intercept, slope = _prefill_line(prefills)
    if not slope:
        raise MeasurementError(
            "its longer prompts took no longer than the short ones; measure it while it has less load"
        )
    prefill_base = min(intercept, decode_base)
    answers = [answer for wave in waves for answer in wave if len(answer.chunks) > 1]
    tokens = sum(answer.output_tokens - 1 for answer in answers)
    several = [each.batch for each in decoded if each.answers > 1]
    return EngineMeasurement(
        passes=PassTimes(prefill_base, slope, decode_base, decode_slope),
        request_seconds=intercept - prefill_base,
        acceptance_length=max(1.0, tokens / sum(len(answer.chunks) - 1 for answer in answers)),
        serialized=bool(several) and statistics.fmean(several) < SERIALIZED_BELOW,
    )


def _prefill_line(prefills: Sequence[Sequence[Answer]]) -> tuple[float, float]:
    """Seconds to the first token without uncached tokens, and per uncached token, of the fastest of each group."""
    fastest = [min(group, key=_first_seconds) for group in prefills]
    return line([(each.uncached_tokens, _first_seconds(each), 1) for each in fastest])


def _first_seconds(answer: Answer) -> float:
    return answer.chunks[0] - answer.sent


def line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Intercept and slope of the weighted least-squares line through (x, y, weight), neither of them negative."""
    total = sum(weight for *_, weight in points)
    mean_x = sum(x * weight for x, _, weight in points) / total
    mean_y = sum(y * weight for _, y, weight in points) / total
    spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    covariance = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points)
    slope = max(0.0, covariance / spread) if spread else 0.0
    if slope * mean_x > mean_y:
        return 0.0, mean_y / mean_x
    return mean_y - slope * mean_x, slope


def _new_text(words: Sequence[str], count: int, rng: random.Random) -> str:
    """A text that no engine has cached, because it begins with a random word."""
    return " ".join([uuid.uuid4().hex, *rng.choices(words, k=count)])


@dataclass(frozen=True)
class _Decoding:
    """The decode steps of one wave: their number, their duration in total, and their mean batch size."""

    answers: int
    steps: int
    seconds: float
    batch: float


def _decoding(wave: Sequence[Answer]) -> _Decoding | None:
    """The decode steps of a wave; None if its answers are too short.

    The first step of each answer is left out, because the other prompts are prefilled before it. Steps are not
    timed one by one, because several parts of an answer may arrive together.
    """
    spans = [(answer.chunks[1], answer.chunks[-1]) for answer in wave if len(answer.chunks) > 2]
    seconds = sum(end - start for start, end in spans)
    if seconds <= 0:
        return None
    shared = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in spans
        for other_start, other_end in spans
    )
    steps = sum(len(answer.chunks) - 2 for answer in wave if len(answer.chunks) > 2)
    return _Decoding(len(spans), steps, seconds, shared / seconds)
