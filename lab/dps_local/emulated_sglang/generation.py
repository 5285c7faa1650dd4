"""The emulated model's answers: deterministic, and planned in full when the request arrives.

The answer is a function of the prompt's tokens, the limit of its length and the engine's seed. Like lossless
speculative decoding, a speculative and a greedy engine with the same seed generate the same answer.

This module performs no I/O.
"""

import hashlib
import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field

MEAN_ANSWER_TOKENS = 96.0
"""The mean length of an answer that no limit cuts short."""


OneIfNull = Annotated[float, BeforeValidator(lambda value: 1.0 if value is None else value)]


class SamplingFields(BaseModel):
    """The sampling parameters of all APIs that matter for random words. Temperature and `top_p` are only validated."""

    n: int = Field(default=1, ge=1)
    temperature: OneIfNull = 1.0
    top_p: OneIfNull = 1.0
    ignore_eos: bool = False


class SamplingParams(SamplingFields):
    """Those of SGLang's native API. `max_new_tokens=None` means up to the context length."""

    max_new_tokens: int | None = 128

    def problem(self) -> str | None:
        """The error message of SGLang's sampling_params.py for invalid values, or None if they are valid."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            return f"temperature must be a non-negative finite number, got {self.temperature}."
        if not 0 < self.top_p <= 1:
            return f"top_p must be in (0, 1], got {self.top_p}."
        if self.max_new_tokens is not None and self.max_new_tokens < 0:
            return f"max_new_tokens must be at least 0, got {self.max_new_tokens}."
        return None


@dataclass(frozen=True)
class Vocabulary:
    """The tokens that answers consist of. Decoding joins their `pieces`; encoding the text yields the same tokens."""

    token_ids: tuple[int, ...]
    pieces: Mapping[int, str]
    eos_token_id: int


@dataclass(frozen=True)
class Plan:
    """A complete answer. The text of its first `k` tokens is `text[:text_ends[k - 1]]`."""

    token_ids: tuple[int, ...]
    text: str
    text_ends: tuple[int, ...]
    finish_reason: dict[str, Any]

    def text_after(self, tokens: int) -> str:
        """The text of the first `tokens` tokens."""
        return self.text[: self.text_ends[tokens - 1]] if tokens else ""


def plan_answer(
    vocabulary: Vocabulary, seed: int, prompt: Sequence[int], params: SamplingParams, room: int, choice: int
) -> Plan:
    """The answer to `prompt`, of at most `room` tokens. Without a limit, its length is geometric.

    choice: its index among `n` parallel answers.
    """
    limit = room if params.max_new_tokens is None else min(room, params.max_new_tokens)
    digest = hashlib.blake2b(array("q", prompt).tobytes(), digest_size=8)
    digest.update(repr((seed, choice)).encode())
    rng = random.Random(int.from_bytes(digest.digest(), "big"))
    natural = 1 + int(rng.expovariate(1 / MEAN_ANSWER_TOKENS))
    ends = not params.ignore_eos and natural < limit
    words = rng.choices(vocabulary.token_ids, k=natural - 1 if ends else limit)
    text, text_ends = "", []
    for token in words:
        text += vocabulary.pieces[token]
        text_ends.append(len(text))
    if not ends:
        return Plan(tuple(words), text, tuple(text_ends), {"type": "length", "length": limit})
    eos = vocabulary.eos_token_id
    return Plan((*words, eos), text, (*text_ends, len(text)), {"type": "stop", "matched": eos})
