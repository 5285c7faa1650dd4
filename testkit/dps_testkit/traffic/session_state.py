"""Checks that no session state was lost between two consecutive turns, by comparing their decisions.

This module performs no I/O. Lengths are in tokens. No tokenizer is needed: ΔL_t is checked against L_t, and L_t against
the engine's count.
"""

from dataclasses import dataclass

from dps_lab.replay.records import Verdict


@dataclass(frozen=True)
class LastTurn:
    """The number and prompt length L of a session's last answered turn; both 0 before the first turn."""

    turn: int = 0
    prompt_tokens: int = 0


def lost_state(before: LastTurn, verdict: Verdict, *, repeated: bool) -> str | None:
    """Describe how `verdict` shows that session state was lost since the turn `before`; None if it does not.

    The turn must be the next one, and ΔL_t must be L_t - L_{t-1} (Eq. 1). `repeated`: the same prompt was sent
    before without a complete answer. If that attempt was committed, this is the same turn with ΔL_t = 0.
    """
    actual = (verdict.history, verdict.turn, verdict.delta_tokens)
    length = verdict.prompt_tokens
    if length is None:
        return f"no decision in the answer's headers: {verdict}"
    number = before.turn + 1
    history = "grown" if before.turn else "new"
    accepted = [(history, number, length - before.prompt_tokens)]
    if repeated:
        accepted.append(("grown", number, 0))
    if actual in accepted:
        return None
    expected = " or ".join(_words(*decision) for decision in accepted)
    return f"{_words(*actual)} (state: {verdict.state}), not {expected}"


def _words(history: str | None, turn: int | None, delta_tokens: int | None) -> str:
    return f"{history} turn {turn}, ΔL {delta_tokens}"
