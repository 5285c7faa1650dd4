"""How long an emulated forward pass takes. Pure; all times in emulated seconds.

The shape is a roofline's: a pass reads the weights once (`decode_base_seconds`) and then computes, in
proportion to the tokens in it. The defaults describe one A100 80 GB with Qwen2.5-7B-Instruct, drafted by
Qwen2.5-1.5B-Instruct where speculation is on, fitted to the paper's Table 1 (BFCL, one stream: 107 tokens/s
greedy, 136 speculative, turns of about twenty tokens on about two hundred new prompt tokens) and to the
shape of its Table 2.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speculation:
    """Draft, then verify: what one speculative step costs and how much of it is accepted.

    `acceptance_length` is SGLang's: the mean tokens a verification yields, the bonus token included (1 to
    `draft_tokens`). `draft_step_seconds` is one forward pass of the draft model; there are `steps` of them
    in a row.
    """

    algorithm: str
    steps: int
    top_k: int
    draft_tokens: int
    draft_step_seconds: float
    acceptance_length: float


SPECULATION_DEFAULTS = {
    "STANDALONE": Speculation("STANDALONE", 3, 1, 4, 0.0022, 2.5),
    "EAGLE": Speculation("EAGLE", 3, 1, 4, 0.0007, 2.6),
    "EAGLE3": Speculation("EAGLE3", 3, 1, 4, 0.0007, 2.9),
    "NGRAM": Speculation("NGRAM", 0, 1, 12, 0.0, 1.6),
}


@dataclass(frozen=True)
class TimeModel:
    """Durations of forward passes on one engine."""

    prefill_tokens_per_second: float = 11_000.0
    decode_base_seconds: float = 0.0081
    decode_seconds_per_request: float = 0.00012
    speculation: Speculation | None = None

    def prefill_seconds(self, uncached_tokens: int) -> float:
        """One prefill pass over the tokens the KV cache lacks; the draft model prefills the same tokens."""
        seconds = self.decode_base_seconds + uncached_tokens / self.prefill_tokens_per_second
        if self.speculation:
            seconds *= 1 + self.speculation.draft_step_seconds / self.decode_base_seconds
        return seconds

    def decode_seconds(self, batch: int) -> float:
        """One decode step of `batch` requests; with speculation, one draft and one verification."""
        target = self.decode_base_seconds + batch * self.decode_seconds_per_request
        if self.speculation is None:
            return target
        draft = self.speculation.steps * self.speculation.draft_step_seconds
        verify = batch * self.speculation.draft_tokens / self.prefill_tokens_per_second
        return draft + target + verify
