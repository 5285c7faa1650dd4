"""Engines that adapt their draft length to the batch, as SGLang and vLLM can.

This module performs no I/O.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Final

from dps_lab.simulate.engine import VirtualEngine
from dps_lab.simulate.roofline import EngineTiming
from dps_local.emulated_sglang.scheduler import Step, StepKind
from dps_local.emulated_sglang.time_model import Speculation, TimeModel

StepsByBatch = Mapping[int, tuple[int, ...]]
"""The draft steps that an engine tries, by the smallest batch to which they apply. 0 steps are greedy decoding."""

SGLANG_STEPS: Final[StepsByBatch] = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
"""Those of SGLang 0.5.23 with --speculative-adaptive."""


def vllm_steps(schedule: Sequence[tuple[int, int, int]]) -> StepsByBatch:
    """The draft steps of vLLM with `num_speculative_tokens_per_batch_size`.

    schedule: (first batch size, last batch size, draft tokens), with inclusive sizes. As in vLLM 0.32.0, batches that
    are in no range have the draft tokens of the range before them.

    Raises ValueError if no range begins at 1, if ranges overlap, or if a number is not possible.
    """
    ranges = sorted(schedule)
    if not ranges or ranges[0][0] != 1:
        raise ValueError("the first range must begin at a batch size of 1")
    if any(first > last or tokens < 0 for first, last, tokens in ranges):
        raise ValueError("a range must not end before it begins, and its draft tokens must not be negative")
    if any(last >= following for (_, last, _), (following, _, _) in pairwise(ranges)):
        raise ValueError("the ranges must not overlap")
    return {first: (tokens,) for first, _, tokens in ranges}


def adapted(
    timing: EngineTiming, base: Speculation, steps_by_batch: StepsByBatch, batch: int, context_tokens: int
) -> Speculation | None:
    """The draft length, of those for this batch, with the most expected tokens per second; None for greedy decoding.

    base: the engine's speculation, from whose acceptance length that of other draft lengths is derived.
    """
    choices = steps_by_batch[max(smallest for smallest in steps_by_batch if smallest <= batch)]
    candidates = [with_steps(base, steps) for steps in choices]

    def rate(speculation: Speculation | None) -> float:
        tokens = 1.0 if speculation is None else speculation.acceptance_length
        fixed = EngineTiming(timing.hardware, speculation, timing.efficiency)
        return tokens / fixed.decode_seconds(batch, context_tokens)

    return max(candidates, key=rate)


@dataclass(frozen=True)
class AdaptiveTiming(EngineTiming):
    """Durations of an engine that adapts. `speculation` is its speculation with the default number of steps."""

    steps_by_batch: StepsByBatch = field(kw_only=True)

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        chosen = self.adapted(batch, context_tokens)
        return EngineTiming(self.hardware, chosen, self.efficiency).decode_seconds(batch, context_tokens)

    def adapted(self, batch: int, context_tokens: int) -> Speculation | None:
        """The speculation of a batch."""
        assert self.speculation is not None
        return adapted(self, self.speculation, self.steps_by_batch, batch, context_tokens)


class AdaptiveEngine(VirtualEngine):
    """A speculative engine whose draft length depends on the batch."""

    timing: AdaptiveTiming

    def change(self, slowdown: float | None, acceptance_length: float | None) -> None:
        super().change(slowdown, acceptance_length)
        if acceptance_length is not None and self.timing.speculation is not None:
            speculation = replace(self.timing.speculation, acceptance_length=acceptance_length)
            self.timing = replace(self.timing, speculation=speculation)

    def next_step(self, now: float) -> Step | None:
        step = super().next_step(now)
        if step is not None and step.kind is StepKind.DECODE:
            contexts = sum(len(sequence.prompt) + sequence.generated for sequence in step.sequences)
            chosen = self.timing.adapted(len(step.sequences), contexts)
            if chosen is not None:
                # The scheduler counts accepted drafts per sequence, over steps with different draft lengths.
                longest = max(steps for choices in self.timing.steps_by_batch.values() for steps in choices)
                chosen = replace(chosen, draft_tokens=longest + 1)
            self.scheduler.time_model = TimeModel(speculation=chosen)
        return step


@lru_cache
def with_steps(base: Speculation, steps: int) -> Speculation | None:
    """The same drafts with another number of steps, if every draft token is accepted with the same probability."""
    if steps == 0:
        return None
    tokens = expected_tokens(acceptance_probability(base), steps)
    return replace(base, steps=steps, draft_tokens=steps + 1, acceptance_length=tokens)


def expected_tokens(probability: float, steps: int) -> float:
    """Mean tokens of a verification of `steps` draft tokens, the bonus token included: 1 + p + ... + p^steps."""
    return sum(probability**position for position in range(steps + 1))


def acceptance_probability(base: Speculation) -> float:
    """The probability p with which a draft token is accepted if the previous ones were, from the mean of `base`."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if expected_tokens(middle, base.steps) < base.acceptance_length:
            low = middle
        else:
            high = middle
    return high
