"""A ToolBench-shaped workload: synthetic, with the lengths that the paper reports of ToolBench sessions.

ToolBench itself is in no package registry. The paper gives its shape: 150 sessions, 592 turns, ΔL from 58 to
4,026 tokens, L from 808 to 8,192 (section 4.4), and the cumulative distribution of ΔL as the `Spec %` column
of Table 3.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dps_lab.workload.sessions import Message, Session, Turn

SESSIONS = 150
TURNS = 592
SHORTEST_PROMPT = 808
LONGEST_PROMPT = 8192

CUMULATIVE_TURNS = {
    64: 1,
    128: 11,
    256: 183,
    384: 248,
    512: 314,
    768: 405,
    1024: 448,
    1536: 512,
    2048: 559,
    4096: 592,
}
"""τ -> turns with ΔL <= τ: of 592, Table 3's 0.2, 1.9, 30.9, 41.9, 53.0, 68.4, 75.7, 86.5, 94.4 and 100 %."""

_LARGEST_SESSION = [4026, 2041, 1530, 595]  # ends at the longest prompt, and has the largest ΔL
_SMALLEST_DELTA = 58
_ANSWER = "I looked that up with the tools I have, and this is what came back for the request."
_WORDS = [
    "the",
    "result",
    "of",
    "each",
    "request",
    "shows",
    "that",
    "one",
    "more",
    "search",
    "may",
    "be",
    "needed",
]


class TokenCounter(Protocol):
    """What text generation needs of a tokenizer and its chat template."""

    def prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """L of a chat prompt, in tokens."""
        ...

    def text_tokens(self, text: str) -> int:
        """Tokens of a text."""
        ...


def toolbench_shaped(seed: int = 0) -> list[list[int]]:
    """ΔL of every turn of every session, in tokens.

    For every seed: 150 sessions, 592 turns, the extremes of ΔL and L exactly the paper's, and exactly
    CUMULATIVE_TURNS. A first turn has L = ΔL, so the first turns are among the large ones.
    """
    rng = random.Random(seed)
    small, large = _draw(rng)
    rng.shuffle(large)
    sessions = [[SHORTEST_PROMPT], *([delta] for delta in large[: SESSIONS - 2])]
    later = small + large[SESSIONS - 2 :]
    rng.shuffle(later)
    for index, delta in enumerate(later):
        # One for each session first, so that every session has a second turn; the rest fall where they fit.
        session = sessions[index % len(sessions)] if index < len(sessions) else rng.choice(sessions)
        while sum(session) + delta >= LONGEST_PROMPT:
            session = rng.choice(sessions)
        session.insert(rng.randint(1, len(session)), delta)
    sessions.insert(rng.randrange(SESSIONS), list(_LARGEST_SESSION))
    return sessions


def _draw(rng: random.Random) -> tuple[list[int], list[int]]:
    """ΔLs too small for a first turn, and the others, without those whose place is fixed."""
    small: list[int] = [_SMALLEST_DELTA]
    large: list[int] = []
    fixed = [_SMALLEST_DELTA, SHORTEST_PROMPT, *_LARGEST_SESSION]
    low, below = _SMALLEST_DELTA, 0
    for high, count in CUMULATIVE_TURNS.items():
        open_places = count - below - sum(low <= delta <= high for delta in fixed)
        # From 808 on in its band, so that every ΔL above 768 may begin a session.
        values = [
            rng.randint(max(low, SHORTEST_PROMPT) if low > 768 else low, min(high, 4026))
            for _ in range(open_places)
        ]
        (large if low > 768 else small).extend(values)
        low, below = high + 1, count
    return small, large


def toolbench_sessions(counter: TokenCounter, seed: int = 0) -> list[Session]:
    """Sessions of filler text whose prompts have exactly the lengths of `toolbench_shaped(seed)`.

    Exact for byte-level BPE with Qwen's way of splitting words; raises ValueError where it would not be.
    """
    rng = random.Random(seed)
    answer: Message = {"role": "assistant", "content": _ANSWER}
    sessions = []
    for number, deltas in enumerate(toolbench_shaped(seed)):
        history: list[Message] = []
        turns: list[Turn] = []
        length = 0
        for delta in deltas:
            length += delta
            frame = counter.prompt_tokens([*history, {"role": "user", "content": ""}])
            message: Message = {"role": "user", "content": text_of(length - frame, counter, rng)}
            history += [message, answer]
            turns.append(Turn(messages=[message], answer=answer))
        if counter.prompt_tokens(history[:-1]) != length:
            raise ValueError(f"with this tokenizer session {number} does not come out at {length} tokens")
        sessions.append(Session(id=f"toolbench_shaped_{number}", turns=turns))
    return sessions


def text_of(tokens: int, counter: TokenCounter, rng: random.Random) -> str:
    """Words that make exactly so many tokens. Raises ValueError when there can be no such text."""
    costs = {word: counter.text_tokens(f" {word}") for word in _WORDS}
    single = [word for word, cost in costs.items() if cost == 1]
    words: list[str] = []
    while tokens > 0:
        word = rng.choice(_WORDS if tokens >= max(costs.values()) else single or _WORDS)
        words.append(word)
        tokens -= costs[word]
    if tokens < 0:
        raise ValueError("no text of that many tokens can be made with this tokenizer")
    return "".join(f" {word}" for word in words)
