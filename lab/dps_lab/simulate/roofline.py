"""How long a forward pass takes: a roofline of memory bandwidth and compute. Times are in seconds.

A pass reads the weights and the KV cache of its sequences, multiplies every token by the weights, and computes
attention. It takes as long as memory access or computation, whichever is slower. The shares of the data sheet's peaks
that are reached, and the fixed costs, are fitted to the paper's Table 1 and to the columns c = 1 and c = 4 of its Table
2; docs/measurements.md has the fit and its errors. This module performs no I/O.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

from dps_lab.simulate.hardware import Hardware, Model
from dps_local.emulated_sglang.scheduler import Sequence, Step, StepKind
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, Speculation

CHUNK_TOKENS: Final = 8192
"""SGLang's --chunked-prefill-size on an 80 GB GPU: longer prefills are split, and each part is a pass."""

MEMORY_FRACTION: Final = 0.88
"""SGLang's --mem-fraction-static: the share of GPU memory for weights and KV cache."""


BANDWIDTH_SHARE: Final = 0.81
COMPUTE_SHARE: Final = 0.75
"""The shares of the peaks that are reached."""

PASS_SECONDS: Final = 0.0004
"""Added to every pass of the target: launches, sampling."""

DRAFT_PASS_SECONDS: Final = 0.0005
"""Added to every pass of the draft."""

REQUEST_SECONDS: Final = 0.006
"""Added to every request before it reaches the scheduler (HTTP, tokenization). The GPU serves others meanwhile."""

FITTED_ACCEPTANCE: Final = 2.35
"""Mean tokens per verification of the draft model, from the same fit."""

SUFFIX: Final = Speculation("SUFFIX", 0, 1, 25, 0.0, 1.2, accept_rate=0.57)
"""vLLM's suffix decoding: up to 24 tokens from a suffix tree, without a draft model.

The acceptance length is fitted to the median latencies of method E in the paper's Table 1. The accepted share is that
which vllm-project/vllm-ascend#7349 reports for HumanEval.
"""

ALGORITHMS: Final = {**SPECULATION_DEFAULTS, "SUFFIX": SUFFIX}
"""The algorithms of SGLang and vLLM, with their default settings."""


@dataclass(frozen=True)
class EngineTiming:
    """Durations of one engine's forward passes. With `speculation` None, decoding is greedy."""

    hardware: Hardware
    speculation: Speculation | None

    @property
    def uses_draft_model(self) -> bool:
        """Whether a separate draft model occupies memory and keeps its own KV cache."""
        return self.speculation is not None and self.speculation.algorithm == "STANDALONE"

    @property
    def weight_bytes(self) -> float:
        """Memory of all weights on this engine."""
        draft = self.hardware.draft.weight_bytes if self.uses_draft_model else 0.0
        return self.hardware.target.weight_bytes + draft

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache of one token, the draft model's included."""
        draft = self.hardware.draft.kv_bytes_per_token if self.uses_draft_model else 0.0
        return self.hardware.target.kv_bytes_per_token + draft

    def step_seconds(self, step: Step, refilled_tokens: int = 0) -> float:
        """Duration of a scheduler step.

        `refilled_tokens` are those whose target KV came from a common cache and whose draft KV did not.
        """
        contexts = sum(len(sequence.prompt) + sequence.generated for sequence in step.sequences)
        if step.kind is StepKind.PREFILL:
            return self.prefill_seconds(step.uncached_tokens, _attended(step.sequences), refilled_tokens)
        return self.decode_seconds(len(step.sequences), contexts)

    def prefill_seconds(self, tokens: int, attended: int = 0, refilled_tokens: int = 0) -> float:
        """Duration of a prefill that computes `tokens` with `attended` (query, key) pairs.

        With a draft model, both models prefill.
        """
        seconds = self._prefill(self.hardware.target, tokens, attended) + PASS_SECONDS
        if self.uses_draft_model:
            seconds += self._prefill(self.hardware.draft, tokens + refilled_tokens, attended)
            seconds += DRAFT_PASS_SECONDS
        return seconds

    def decode_seconds(self, batch: int, context_tokens: int) -> float:
        """Duration of a decode step of `batch` sequences whose contexts have `context_tokens` in total.

        The step drafts and verifies, or is one pass if decoding is greedy.
        """
        target = self.hardware.target
        if self.speculation is None:
            return self._pass(target, batch, context_tokens, context_tokens) + PASS_SECONDS
        verified = batch * self.speculation.verified_tokens
        pairs = context_tokens * self.speculation.verified_tokens
        seconds = self._pass(target, verified, context_tokens, pairs) + PASS_SECONDS
        if self.uses_draft_model:
            draft = self._pass(self.hardware.draft, batch, context_tokens, context_tokens)
            return seconds + self.speculation.steps * (draft + DRAFT_PASS_SECONDS)
        return seconds + self.speculation.steps * self.speculation.draft_step_seconds

    def _prefill(self, model: Model, tokens: int, pairs: int) -> float:
        chunks = max(1, math.ceil(tokens / CHUNK_TOKENS))
        return chunks * self._pass(model, tokens / chunks, 0, pairs / chunks)

    def _pass(self, model: Model, tokens: float, context_tokens: int, pairs: float) -> float:
        """A forward pass over `tokens` that reads the KV of `context_tokens` and computes `pairs` attention scores."""
        gpus = self.hardware.tensor_parallel
        moved = 2 * model.active_parameters + context_tokens * model.kv_bytes_per_token
        operations = 2 * model.active_parameters * tokens
        operations += 4 * model.layers * model.query_heads * model.head_size * pairs
        by_bandwidth = moved / (gpus * self.hardware.gpu.bytes_per_second * BANDWIDTH_SHARE)
        by_compute = operations / (gpus * self.hardware.gpu.flops * COMPUTE_SHARE)
        return max(by_bandwidth, by_compute)


def kv_capacity(timings: list[EngineTiming]) -> list[int]:
    """KV cache capacity, in tokens, of each of the engines that share the same GPUs.

    The memory that the weights leave is divided equally, in bytes.

    Raises ValueError if the weights do not fit.
    """
    hardware = timings[0].hardware
    total = hardware.tensor_parallel * hardware.gpu.memory_bytes * MEMORY_FRACTION
    free = total - sum(timing.weight_bytes for timing in timings)
    if free <= 0:
        raise ValueError(
            f"the weights of {len(timings)} engine(s) need more than the {total / 1e9:.0f} GB that "
            f"{hardware.tensor_parallel} x {hardware.gpu.name} offer; use fewer engines per GPU"
        )
    return [int(free / len(timings) / timing.kv_bytes_per_token) for timing in timings]


def speculation(algorithm: str, acceptance_length: float | None = None) -> Speculation:
    """The default settings of an algorithm, with the given mean acceptance length.

    The default is the fitted length for a draft model, and that of ALGORITHMS for others.

    Raises ValueError if the length is not between 1 and the number of draft tokens.
    """
    chosen = ALGORITHMS[algorithm]
    if acceptance_length is None:
        acceptance_length = FITTED_ACCEPTANCE if algorithm == "STANDALONE" else chosen.acceptance_length
    if not 1 <= acceptance_length <= chosen.draft_tokens:
        raise ValueError(
            f"an acceptance length of {acceptance_length:g} is impossible with {algorithm}: choose 1 to "
            f"{chosen.draft_tokens}, its number of draft tokens"
        )
    return replace(chosen, acceptance_length=acceptance_length)


def _attended(sequences: tuple[Sequence, ...]) -> int:
    """(query, key) pairs of causal attention over the prompts' uncached parts."""
    pairs = 0
    for sequence in sequences:
        length = len(sequence.prompt)
        pairs += (length * (length + 1) - sequence.cached_tokens * (sequence.cached_tokens + 1)) // 2
    return pairs
