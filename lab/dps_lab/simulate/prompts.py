"""Token sequences for a length trace, so that the engines' radix caches see the reuse that it describes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dps_lab.simulate.trace import SessionTrace

SPACE = 1 << 32
"""Token ids reserved for each prefix and for each session, so that no two of them share a token."""


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

    @property
    def delta_tokens(self) -> int:
        """ΔL_t = L_t - L_{t-1} (paper, Eq. 1)."""
        return len(self.prompt) - self.base_tokens


@dataclass(frozen=True)
class PlannedSession:
    """A session of a trace, with token ids."""

    trace: SessionTrace
    number: int
    prefix: tuple[int, ...]

    def turns(self) -> Iterator[PlannedTurn]:
        """The session's requests, in order.

        A prompt extends the previous prompt with the previous answer, as far as its length allows, and then
        with new tokens. A prompt that is shorter than the previous one is a rewritten history (compaction):
        only the shared prefix is reused.
        """
        fresh = _Allocator((self.number + 1) * SPACE)
        previous: tuple[int, ...] = ()
        answer: tuple[int, ...] = ()
        for lengths in self.trace.turns:
            if lengths.prompt_tokens < len(previous) or not previous:
                base, known = 0, self.prefix
            else:
                base, known = len(previous), (previous + answer)[: lengths.prompt_tokens]
            prompt = known + fresh.take(lengths.prompt_tokens - len(known))
            previous, answer = prompt, fresh.take(lengths.output_tokens)
            yield PlannedTurn(prompt, answer, base, lengths.think_seconds)


class _Allocator:
    """Consecutive token ids."""

    def __init__(self, start: int) -> None:
        self._next = start

    def take(self, count: int) -> tuple[int, ...]:
        start = self._next
        self._next += count
        return tuple(range(start, self._next))


def plan_sessions(sessions: Sequence[SessionTrace]) -> list[PlannedSession]:
    """Assign token ids to every session of a trace."""
    starts: dict[str, int] = {}
    planned = []
    for number, session in enumerate(sessions):
        prefix: tuple[int, ...] = ()
        if session.prefix is not None:
            start = starts.setdefault(session.prefix, -(len(starts) + 1) * SPACE)
            prefix = tuple(range(start, start + session.prefix_tokens))
        planned.append(PlannedSession(session, number, prefix))
    return planned
