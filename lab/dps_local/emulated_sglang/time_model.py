"""The duration of an emulated forward pass, in emulated seconds. This module performs no I/O.

It is a roofline model: a pass reads the weights once (`decode_base_seconds`) and then computes in proportion
to its tokens. The defaults model Qwen2.5-7B-Instruct on one A100 80 GB, with Qwen2.5-1.5B-Instruct as draft
model, fitted to the paper's Table 1 (BFCL, one stream: 107 tokens/s greedy, 136 speculative, answers of about
20 tokens to about 200 new prompt tokens) and to the trend of its Table 2.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speculation:
    """Cost and yield of a speculative step: `steps` passes of the draft model, then one verification.

    draft_step_seconds: duration of one forward pass of the draft model.
    acceptance_length: mean tokens per verification including the bonus token, as SGLang defines it; from 1 to
    `draft_tokens`.
    accept_rate: accepted share of the drafted tokens, if the algorithm drafts only what is likely to be accepted, up to
    `draft_tokens` - 1; None if it always drafts that many.
    """

    algorithm: str
    steps: int
    top_k: int
    draft_tokens: int
    draft_step_seconds: float
    acceptance_length: float
    accept_rate: float | None = None

    @property
    def verified_tokens(self) -> float:
        """Mean tokens that a verification computes for each request, bonus token included."""
        if self.accept_rate is None:
            return self.draft_tokens
        return min(self.draft_tokens, 1 + (self.acceptance_length - 1) / self.accept_rate)


SPECULATION_DEFAULTS = {
    "STANDALONE": Speculation("STANDALONE", 3, 1, 4, 0.0022, 2.5),
    "EAGLE": Speculation("EAGLE", 3, 1, 4, 0.0007, 2.6),
    "EAGLE3": Speculation("EAGLE3", 3, 1, 4, 0.0007, 2.9),
    "NGRAM": Speculation("NGRAM", 0, 1, 12, 0.0, 1.6),
}


@dataclass(frozen=True)
class TimeModel:
    """Durations of one engine's forward passes."""

    prefill_tokens_per_second: float = 11_000.0
    decode_base_seconds: float = 0.0081
    decode_seconds_per_request: float = 0.00012
    speculation: Speculation | None = None

    def prefill_seconds(self, uncached_tokens: int, refilled_tokens: int = 0) -> float:
        """A prefill pass over `uncached_tokens`. With speculation, the draft model prefills them as well.

        refilled_tokens: tokens that only the draft model prefills.
        """
        seconds = self.decode_base_seconds + uncached_tokens / self.prefill_tokens_per_second
        if self.speculation:
            draft_share = self.speculation.draft_step_seconds / self.decode_base_seconds
            seconds += draft_share * (seconds + refilled_tokens / self.prefill_tokens_per_second)
        return seconds

    def decode_seconds(self, batch: int) -> float:
        """A decode step of `batch` requests: with speculation, the drafts and one verification."""
        target = self.decode_base_seconds + batch * self.decode_seconds_per_request
        if self.speculation is None:
            return target
        draft = self.speculation.steps * self.speculation.draft_step_seconds
        verify = batch * self.speculation.verified_tokens / self.prefill_tokens_per_second
        return draft + target + verify
