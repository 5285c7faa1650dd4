"""Whether a session went on where it was: what a gateway said of a turn, beside what was said of the one before.

Pure. Lengths in tokens. Needs no tokenizer: L_t is checked against the engine's own count, ΔL_t against L_t.
"""

from dataclasses import dataclass

from dps_lab.replay.records import Verdict


@dataclass(frozen=True)
class Place:
    """Where a session is: the number and the length L of its last answered turn; 0 and 0 before the first."""

    turn: int = 0
    prompt_tokens: int = 0


def forgotten(before: Place, verdict: Verdict, *, repeated: bool) -> str | None:
    """What `verdict` does not remember of a session that was at `before`; None if nothing is missing.

    A turn is the next one and has grown by L_t - L_{t-1} (Eq. 1). `repeated`: the same prompt was sent before,
    and broke; if it was committed then, it is the same turn again, and nothing in it is new.
    """
    told = (verdict.history, verdict.turn, verdict.delta_tokens)
    length = verdict.prompt_tokens
    if length is None:
        return f"no decision in the answer's headers: {verdict}"
    number = before.turn + 1
    history = "grown" if before.turn else "new"
    wanted = [(history, number, length - before.prompt_tokens)]
    if repeated:
        wanted.append(("grown", number, 0))
    if told in wanted:
        return None
    expected = " or ".join(_words(*one) for one in wanted)
    return f"{_words(*told)} (state: {verdict.state}), not {expected}"


def _words(history: str | None, turn: int | None, delta_tokens: int | None) -> str:
    return f"{history} turn {turn}, ΔL {delta_tokens}"
