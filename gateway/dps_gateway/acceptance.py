"""How many drafted tokens of a session are accepted. This module performs no I/O."""

from typing import Final, NamedTuple

REFERENCE: Final = 2.35
"""Tokens per verification that are expected without any observation: those that the prior speed of the speculative pool
is for."""

MEMORY: Final = 0.6
"""Factor of the weight of an observed turn for each later turn. The acceptance may change with the subject."""

MAX_TOKENS: Final = 2**53
"""The largest valid number in the stored form."""

KNOWN_WEIGHT: Final = 0.5
"""Weight of a session's own turns in the expectation from which on its acceptance counts as known."""

RECORDED_CHANGE: Final = 0.05
"""Relative change of a session's mean tokens per verification that is recorded."""

RECORDED_WEIGHT: Final = 0.8
"""A turn is also recorded if the weight of what is known would be lower without it."""

PRIOR_VERIFICATIONS: Final = 4.0
"""Weight of what is expected of similar sessions, in verifications."""


class Acceptance(NamedTuple):
    """What is known about the drafts of a session, as decayed sums over its verifications."""

    tokens: float = 0.0
    """Tokens that the verifications yielded, bonus tokens included."""
    verifications: float = 0.0
    turn: int = 0
    """The number of the last turn that was observed."""

    def weight(self, turn: int) -> float:
        """The weight, from 0 to 1, of what is known in the expectation for turn number `turn`."""
        verifications = MEMORY ** max(0, turn - self.turn - 1) * self.verifications
        return verifications / (verifications + PRIOR_VERIFICATIONS)

    def expected_tokens(self, prior: float, turn: int) -> float:
        """Expected tokens per verification in turn number `turn`, at least 1. prior: those of similar sessions."""
        if not self.verifications:
            return prior
        weight = self.weight(turn)
        return weight * self.tokens / self.verifications + (1 - weight) * prior

    def observed(self, tokens: int, verifications: int, turn: int) -> "Acceptance":
        """This after turn number `turn`, in which `verifications` yielded `tokens`."""
        weight = MEMORY ** max(0, turn - self.turn)
        # An engine may count the first token of an answer, which no verification yielded.
        yielded = max(tokens, verifications)
        return Acceptance(
            weight * self.tokens + yielded, weight * self.verifications + verifications, max(turn, self.turn)
        )

    def changed_by(self, tokens: int, verifications: int, turn: int) -> bool:
        """Whether turn number `turn` changes what is known enough to be recorded, which takes a write to the store."""
        seen = self.observed(tokens, verifications, turn)
        if not self.verifications or self.weight(turn + 1) < RECORDED_WEIGHT:
            return True
        before, after = self.tokens / self.verifications, seen.tokens / seen.verifications
        return abs(after - before) > RECORDED_CHANGE * before

    def encode(self) -> list[int]:
        """The stored form of whole numbers, empty if nothing is known."""
        return [round(self.tokens), round(self.verifications), self.turn] if self.verifications else []

    @classmethod
    def decode(cls, tokens: int = 0, verifications: int = 0, turn: int = 0) -> "Acceptance":
        """Parse the stored form. Raises ValueError or TypeError for numbers that are impossible."""
        if not (0 <= verifications <= tokens <= MAX_TOKENS and 0 <= turn <= MAX_TOKENS):
            raise ValueError("a number of tokens, of verifications or of a turn is out of range")
        return cls(float(tokens), float(verifications), int(turn))


UNKNOWN: Final = Acceptance()
"""Nothing is known."""
