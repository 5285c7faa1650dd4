"""The acceptance of drafts that is expected of a session about which nothing is known. This module performs no I/O."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from dps_gateway.acceptance import REFERENCE

MEMORY: Final = 0.99
"""Factor of the weight of a turn for each later turn of the same kind of session."""

STRENGTH: Final = 5.0
"""Weight, in turns, of all sessions in the expectation for one kind, and of REFERENCE in that for all sessions."""

MAX_KINDS: Final = 64
"""Maximum number of kinds. The one whose last turn is the oldest is dropped first."""


class Turns(NamedTuple):
    """Decayed sums over the turns of one kind of session."""

    turns: float = 0.0
    verifications: float = 0.0
    """The sum of the verifications per output token."""

    def plus(self, other: "Turns", factor: float = 1.0) -> "Turns":
        """The sums over the turns of both, those of `other` multiplied by `factor`."""
        return Turns(self.turns + factor * other.turns, self.verifications + factor * other.verifications)


Kinds = dict[str, Turns]
"""What has been observed, by `PolicyInput.kind`, in the order of the last observations."""


def count(kinds: Kinds, kind: str, tokens: int, verifications: int) -> None:
    """Count a turn of this kind of session, whose `verifications`, at least one, yielded `tokens`."""
    rate = min(1.0, verifications / max(1, tokens))
    kinds[kind] = Turns(1.0, rate).plus(kinds.pop(kind, Turns()), MEMORY)
    if len(kinds) > MAX_KINDS:
        del kinds[next(iter(kinds))]


def expected_tokens(kinds: Mapping[str, Turns], kind: str) -> float:
    """Tokens per verification of a session of this kind. With few observations, it is close to that of all sessions.

    It is the harmonic mean, because the time for an answer is proportional to the verifications per token.
    """
    every = Turns(STRENGTH, STRENGTH / REFERENCE)
    for each in kinds.values():
        every = every.plus(each)
    known = kinds.get(kind, Turns()).plus(every, STRENGTH / every.turns)
    return known.turns / known.verifications


def combined(own: Kinds, others: list[Kinds]) -> Kinds:
    """What several processes have observed, of the kinds that this process knows last."""
    total: Kinds = {}
    for kinds in (*others, own):
        for kind, turns in kinds.items():
            total[kind] = turns.plus(total.pop(kind, Turns()))
    return dict(list(total.items())[-MAX_KINDS:])
