"""Engines that adapt their draft length to the batch, as SGLang and vLLM can.

This module performs no I/O.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
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


class AdaptiveEngine(VirtualEngine):
    """A speculative engine whose draft length depends on the batch: the one with the most expected tokens per second.

    It knows the acceptance probability of every running request, which real engines estimate.
    """

    steps_by_batch: StepsByBatch = SGLANG_STEPS

    def step_seconds(self, step: Step, refilled_tokens: int) -> float:
        if step.kind is StepKind.PREFILL:
            return super().step_seconds(step, refilled_tokens)
        base = self.timing.speculation
        assert base is not None
        usual = acceptance_probability(base)
        contexts = sum(len(sequence.prompt) + sequence.generated for sequence in step.sequences)
        batch = Counter(usual if each.acceptance is None else each.acceptance for each in step.sequences)
        chosen = adapted(self.timing, base, self.steps_by_batch, batch, contexts)
        self.scheduler.time_model = TimeModel(speculation=chosen)
        return replace(self.timing, speculation=chosen).decode_seconds(len(step.sequences), contexts)


def adapted(
    timing: EngineTiming,
    base: Speculation,
    steps_by_batch: StepsByBatch,
    batch: Mapping[float, int],
    context_tokens: int,
) -> Speculation | None:
    """The draft length, of those for this batch, with the most expected tokens per second; None for greedy decoding.

    base: the engine's speculation, from whose acceptance length that of other draft lengths is derived.
    batch: the number of running requests by their acceptance probability.
    """
    size = sum(batch.values())
    choices = steps_by_batch[max(smallest for smallest in steps_by_batch if smallest <= size)]

    def rate(steps: int) -> float:
        tokens = sum(count * expected_tokens(probability, steps) for probability, count in batch.items())
        seconds = replace(timing, speculation=with_steps(base, steps)).decode_seconds(size, context_tokens)
        return tokens / seconds

    return with_steps(base, choices[0] if len(choices) == 1 else max(choices, key=rate))


@lru_cache
def with_steps(base: Speculation, steps: int) -> Speculation | None:
    """The same drafts with another number of steps, if every draft token is accepted with the same probability."""
    if steps == 0:
        return None
    tokens = expected_tokens(acceptance_probability(base), steps)
    return replace(base, steps=steps, draft_tokens=steps + 1, acceptance_length=tokens)


@lru_cache
def expected_tokens(probability: float, steps: int) -> float:
    """Mean tokens of a verification of `steps` draft tokens, the bonus token included: 1 + p + ... + p^steps."""
    return sum(probability**position for position in range(steps + 1))


@lru_cache
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
