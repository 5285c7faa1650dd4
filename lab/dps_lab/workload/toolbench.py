"""A synthetic workload with the prompt lengths that the paper reports for ToolBench sessions.

ToolBench itself is not in a package registry. The paper reports its shape: 150 sessions, 592 turns, ΔL from 58
to 4,026 tokens, L from 808 to 8,192 (section 4.4), and the cumulative distribution of ΔL in the `Spec %` column
of Table 3.
"""

import random

from dps_lab.workload.sessions import Message, Session, Turn
from dps_local.emulated_sglang.prompt import Prompts

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
"""Number of turns with ΔL <= τ, by τ: of 592, Table 3's 0.2, 1.9, 30.9, 41.9, 53.0, 68.4, 75.7, 86.5, 94.4, 100%."""

_LARGEST_SESSION = [4026, 2041, 1530, 595]  # has the largest ΔL, and ends with the longest prompt
_SMALLEST_DELTA = 58
_ANSWER = "I looked that up with the tools I have, and this is what came back for the request."
_SENTENCE = "the result of each request shows that one more search may be needed"


def toolbench_shaped(seed: int = 0) -> list[list[int]]:
    """ΔL of every turn of every session, in tokens.

    For every seed, the numbers of sessions and turns, the extremes of ΔL and L, and the distribution
    CUMULATIVE_TURNS are exactly the paper's. First turns have L = ΔL, so they take large values.
    """
    rng = random.Random(seed)
    small, large = _draw(rng)
    rng.shuffle(large)
    sessions = [[SHORTEST_PROMPT], *([delta] for delta in large[: SESSIONS - 2])]
    later = small + large[SESSIONS - 2 :]
    rng.shuffle(later)
    for index, delta in enumerate(later):
        # First, every session is given a second turn; then each remaining turn goes to a random session that it fits.
        session = sessions[index % len(sessions)] if index < len(sessions) else rng.choice(sessions)
        while sum(session) + delta >= LONGEST_PROMPT:
            session = rng.choice(sessions)
        session.insert(rng.randint(1, len(session)), delta)
    sessions.insert(rng.randrange(SESSIONS), list(_LARGEST_SESSION))
    return sessions


def _draw(rng: random.Random) -> tuple[list[int], list[int]]:
    """Values of ΔL too small for a first turn, and larger ones, without those that are placed separately."""
    small: list[int] = [_SMALLEST_DELTA]
    large: list[int] = []
    fixed = [_SMALLEST_DELTA, SHORTEST_PROMPT, *_LARGEST_SESSION]
    low, below = _SMALLEST_DELTA, 0
    for high, count in CUMULATIVE_TURNS.items():
        missing = count - below - sum(low <= delta <= high for delta in fixed)
        # Values above 768 are at least 808, the shortest prompt, so that each of them can start a session.
        values = [
            rng.randint(max(low, SHORTEST_PROMPT) if low > 768 else low, min(high, 4026))
            for _ in range(missing)
        ]
        (large if low > 768 else small).extend(values)
        low, below = high + 1, count
    return small, large


def toolbench_sessions(prompts: Prompts, seed: int = 0) -> list[Session]:
    """Sessions of filler text whose prompts have exactly the lengths of `toolbench_shaped(seed)`.

    This works for byte-level BPE with Qwen's pre-tokenization. Raises ValueError for other tokenizers.
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
            frame = prompts.prompt_tokens([*history, {"role": "user", "content": ""}])
            message: Message = {"role": "user", "content": text_of(length - frame, prompts, rng)}
            history += [message, answer]
            turns.append(Turn(messages=[message], answer=answer))
        if prompts.prompt_tokens(history[:-1]) != length:
            raise ValueError(f"with this tokenizer, session {number} does not have exactly {length} tokens")
        sessions.append(Session(id=f"toolbench_shaped_{number}", turns=turns))
    return sessions


def text_of(tokens: int, prompts: Prompts, rng: random.Random) -> str:
    """Random words with exactly this number of tokens. Raises ValueError if the tokenizer does not allow it."""
    choices = _SENTENCE.split()
    costs = {word: prompts.text_tokens(f" {word}") for word in choices}
    single = [word for word, cost in costs.items() if cost == 1]
    words: list[str] = []
    while tokens > 0:
        word = rng.choice(choices if tokens >= max(costs.values()) else single or choices)
        words.append(word)
        tokens -= costs[word]
    if tokens < 0:
        raise ValueError("this tokenizer does not allow a text of exactly that many tokens")
    return "".join(f" {word}" for word in words)
