"""Engines that adapt their draft length to the batch, like SGLang with --speculative-adaptive.

This module performs no I/O.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from dps_lab.simulate.engine import VirtualEngine
from dps_lab.simulate.roofline import EngineTiming
from dps_local.emulated_sglang.scheduler import Step, StepKind
from dps_local.emulated_sglang.time_model import Speculation, TimeModel

STEPS_BY_BATCH: Final[Mapping[int, tuple[int, ...]]] = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
"""The draft steps that SGLang 0.5.23 tries, by the smallest batch to which they apply. Without steps, decoding is
greedy."""

LONGEST: Final = max(steps for choices in STEPS_BY_BATCH.values() for steps in choices)


def adapted(timing: EngineTiming, base: Speculation, batch: int, context_tokens: int) -> Speculation | None:
    """The draft length, of those for this batch, with the most expected tokens per second; None for greedy decoding.

    base: the engine's speculation, from whose acceptance length that of other draft lengths is derived.
    """
    choices = STEPS_BY_BATCH[max(smallest for smallest in STEPS_BY_BATCH if smallest <= batch)]
    candidates = [with_steps(base, steps) for steps in choices]

    def rate(speculation: Speculation | None) -> float:
        tokens = 1.0 if speculation is None else speculation.acceptance_length
        fixed = EngineTiming(timing.hardware, speculation, timing.efficiency)
        return tokens / fixed.decode_seconds(batch, context_tokens)

    return max(candidates, key=rate)


@dataclass(frozen=True)
class AdaptiveTiming(EngineTiming):
    """Durations of an engine that adapts. `speculation` is its speculation with the default number of steps."""

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        chosen = self.adapted(batch, context_tokens)
        return EngineTiming(self.hardware, chosen, self.efficiency).decode_seconds(batch, context_tokens)

    def adapted(self, batch: int, context_tokens: int) -> Speculation | None:
        """The speculation of a batch."""
        assert self.speculation is not None
        return adapted(self, self.speculation, batch, context_tokens)


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
                chosen = replace(chosen, draft_tokens=LONGEST + 1)
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
