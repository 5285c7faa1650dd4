"""Token sequences for a length trace, so that the engines' radix caches see the reuse that it describes.

A run of new tokens is a unique id followed by zeros: two runs differ from their first token on, which is all
that a prefix cache can observe, and sequences of one repeated integer are fast to copy and to compare.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dps_lab.simulate.trace import SessionTrace

SPACE = 1 << 32
"""Number of token ids in a range from which the first tokens of runs are taken. The shared prefixes have one range, and
each session has one."""


@dataclass(frozen=True)
class PlannedTurn:
    """One request: its prompt, its answer and its growth.

    `base_tokens` is the part of the prompt that the session's previous request has in common with it
    (L_{t-1} if the history only grew), so ΔL_t is the rest.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    base_tokens: int
    think_seconds: float
    acceptance: float | None = None
    """See `SessionTrace.acceptance`."""

    @property
    def delta_tokens(self) -> int:
        """ΔL_t = L_t - L_{t-1} (paper, Eq. 1)."""
        return len(self.prompt) - self.base_tokens


@dataclass(frozen=True)
class PlannedSession:
    """A session of a trace, with the tokens of its shared prefix."""

    trace: SessionTrace
    number: int
    prefix: tuple[int, ...]

    def turns(self) -> Iterator[PlannedTurn]:
        """The session's requests, in order.

        A prompt extends the previous prompt with the previous answer, as far as its length allows, and then
        with new tokens. A prompt that is shorter than the previous one is a rewritten history (compaction):
        only the shared prefix is reused.
        """
        first_tokens = itertools.count((self.number + 1) * SPACE + 1)
        previous: tuple[int, ...] = ()
        answer: tuple[int, ...] = ()
        for lengths, base in zip(self.trace.turns, self.trace.base_tokens(), strict=True):
            known = (previous + answer)[: lengths.prompt_tokens] if base else self.prefix
            prompt = known + _run(first_tokens, lengths.prompt_tokens - len(known))
            previous, answer = prompt, _run(first_tokens, lengths.output_tokens)
            acceptance = self.trace.acceptance if lengths.acceptance is None else lengths.acceptance
            yield PlannedTurn(prompt, answer, base, lengths.think_seconds, acceptance)


def _run(first_tokens: Iterator[int], count: int) -> tuple[int, ...]:
    """A run of `count` new tokens, of which only the first one is unique."""
    return (next(first_tokens),) + (0,) * (count - 1) if count else ()


def plan_sessions(sessions: Sequence[SessionTrace]) -> list[PlannedSession]:
    """Assign tokens to every session of a trace."""
    longest: dict[str, int] = {}
    for session in sessions:
        if session.prefix is not None:
            longest[session.prefix] = max(longest.get(session.prefix, 0), session.prefix_tokens)
    first_tokens = itertools.count(1)
    prefixes = {name: _run(first_tokens, length) for name, length in longest.items()}
    return [
        PlannedSession(
            session,
            number,
            () if session.prefix is None else prefixes[session.prefix][: session.prefix_tokens],
        )
        for number, session in enumerate(sessions)
    ]
