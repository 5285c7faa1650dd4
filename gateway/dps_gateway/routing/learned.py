"""What the policy `Adaptive` has observed, as decayed sums, and their JSON form. This module performs no I/O.

The sums of several gateway processes can be added.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from dps_gateway.acceptance import REFERENCE
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Document

FORMAT_VERSION: Final = 4
"""Contained in every exported document. Documents of other versions are ignored."""

MEMORY: Final = 0.99
"""Factor of an observation's weight for each later observation of the same pool, or of the same kind of session."""

COUNTED_TURNS: Final = 32
"""Turns of a session with this or a higher number are counted together."""

MAX_KINDS: Final = 64
"""Maximum number of kinds of sessions. The one whose last turn is the oldest is dropped first."""

KIND_STRENGTH: Final = 5.0
"""Weight, in turns, of all sessions in the expectation for one kind, and of REFERENCE in that for all sessions."""

UNCACHED_KINDS: Final = ("grown", "new", "moved")
"""Kinds of tokens of a prompt that may or may not be cached (see `estimates.uncached_tokens`)."""

_TOKEN_KINDS: Final = (*UNCACHED_KINDS, "fetchable")
"""These, and the tokens that can be fetched."""

_PRIOR_TOKENS: Final = 1000.0
"""Weight, in tokens, of the prior when the share of cached tokens is estimated: everything that can be fetched is, and
nothing else is cached."""

SWEEPS: Final = 12
"""Passes of coordinate descent. They start at the previous solution, so that few are sufficient."""


@dataclass(slots=True)
class Moments:
    """Online least squares with non-negative coefficients, a prior and exponential forgetting.

    Only the weighted sums over the observations of several features x and one response y are kept.
    """

    products: list[float]
    """Σ w x xᵀ, row by row."""
    responses: list[float]
    """Σ w x y."""

    @classmethod
    def zero(cls, size: int) -> Self:
        """No observations of `size` features."""
        return cls([0.0] * size**2, [0.0] * size)

    def decay(self, factor: float) -> None:
        """Multiply the weights of all observations by `factor`."""
        self.products = [factor * value for value in self.products]
        self.responses = [factor * value for value in self.responses]

    def add(self, features: Sequence[float], response: float, weight: float) -> None:
        """Add one observation."""
        size = len(features)
        for row, left in enumerate(features):
            if left:
                for column, right in enumerate(features):
                    self.products[row * size + column] += weight * left * right
                self.responses[row] += weight * left * response

    def plus(self, other: Self) -> "Moments":
        """The sums over the observations of both. Raises ValueError if they have different features."""
        return Moments(
            [a + b for a, b in zip(self.products, other.products, strict=True)],
            [a + b for a, b in zip(self.responses, other.responses, strict=True)],
        )

    def solve(
        self, prior: Sequence[float], strengths: Sequence[float], start: Sequence[float]
    ) -> list[float]:
        """The coefficients β >= 0 that minimise Σ w (y - βx)² + Σ strength (β - prior)².

        The search starts at `start`. `strengths` must be positive.
        """
        size, products = len(self.responses), self.products
        beta = list(start)
        for _ in range(SWEEPS):
            for row in range(size):
                first = row * size
                diagonal = products[first + row]
                explained = sum(products[first + column] * beta[column] for column in range(size))
                free = self.responses[row] - explained + diagonal * beta[row]
                beta[row] = max(0.0, (free + strengths[row] * prior[row]) / (diagonal + strengths[row]))
        return beta


class Coefficients(NamedTuple):
    """The speed of a pool: one number for each feature of a turn, in seconds per unit of the feature."""

    fixed: float
    """Per turn."""
    prefill: float
    """Per 1,000 prefilled tokens."""
    fetch: float
    """Per 1,000 tokens that are fetched from a common prefix cache."""
    wait: float
    """Per request that waits until another one ends (see `estimates.split`)."""
    token: float
    """Per output token."""
    token_load: float
    """Per output token and other running request."""


FEATURES: Final = len(Coefficients._fields)


@dataclass(slots=True)
class Statistics:
    """What has been observed of one pool."""

    moments: Moments = field(default_factory=lambda: Moments.zero(FEATURES))
    expected: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TOKEN_KINDS, 0.0))
    """Tokens that were not cached according to the sessions' records, by kind."""
    cached: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_TOKEN_KINDS, 0.0))
    """Those of them that the engine had cached nevertheless, for example as part of another session's prompt."""

    def plus(self, other: Self) -> "Statistics":
        """The statistics of the observations of both."""
        return Statistics(
            self.moments.plus(other.moments),
            {kind: self.expected[kind] + other.expected[kind] for kind in _TOKEN_KINDS},
            {kind: self.cached[kind] + other.cached[kind] for kind in _TOKEN_KINDS},
        )

    def count_cached(self, uncached: Mapping[str, float], computed: float) -> None:
        """Add a prompt with `uncached` tokens by kind, of which the engine computed `computed`."""
        for kind, tokens in uncached.items():
            missed = min(tokens, computed)
            computed -= missed
            self._count(kind, tokens, tokens - missed)

    def count_fetched(self, fetchable: float, fetched: float) -> None:
        """Add a prompt of which `fetchable` tokens could have been fetched, and `fetched` were."""
        self._count("fetchable", fetchable, min(fetchable, fetched))

    def uncached_share(self, *kinds: str) -> float:
        """The estimated share of the tokens of these kinds that the engine has to compute."""
        cached, expected = (sum(sums[kind] for kind in kinds) for sums in (self.cached, self.expected))
        return 1 - cached / (expected + _PRIOR_TOKENS)

    def fetched_share(self) -> float:
        """The estimated share that the engine fetches of the tokens that the other pool has cached."""
        cached, expected = self.cached["fetchable"], self.expected["fetchable"]
        return (cached + _PRIOR_TOKENS) / (expected + _PRIOR_TOKENS)

    def _count(self, kind: str, expected: float, cached: float) -> None:
        if expected:
            self.expected[kind] = self.expected[kind] * MEMORY + expected
            self.cached[kind] = self.cached[kind] * MEMORY + cached


@dataclass(slots=True)
class Workload:
    """What has been observed of the answered turns. The initial values are a weak prior."""

    output_tokens: float = 256.0
    reached: list[float] = field(default_factory=lambda: [0.75**number for number in range(COUNTED_TURNS)])
    """Answered turns with the number 1, 2, ... in their session."""

    @property
    def answer_tokens(self) -> float:
        """Mean length of an answer."""
        return self.output_tokens / sum(self.reached)

    def turns_after(self, number: int) -> float:
        """Expected number of turns that follow turn `number` of a session: its mean residual life.

        It cannot be derived from the mean length of sessions: most sessions that have exceeded the mean continue, and
        while few sessions start, for example at the end of a batch, the number of turns per started session is far
        above the mean.
        """
        index = min(number, COUNTED_TURNS) - 1
        return sum(self.reached[index + 1 :]) / max(1.0, self.reached[index])

    def observe(self, number: int, output_tokens: int) -> None:
        """Count an answered turn."""
        self.reached = [MEMORY * count for count in self.reached]
        self.reached[min(number, COUNTED_TURNS) - 1] += 1
        self.output_tokens = self.output_tokens * MEMORY + output_tokens

    def plus(self, other: Self) -> "Workload":
        """The sums over the turns of both."""
        return Workload(
            self.output_tokens + other.output_tokens,
            [own + others for own, others in zip(self.reached, other.reached, strict=True)],
        )


class Drafted(NamedTuple):
    """The turns of one kind of session for which the engine has reported verifications of drafts."""

    turns: float = 0.0
    verifications: float = 0.0
    """The sum of the verifications per output token."""

    def plus(self, other: "Drafted", factor: float = 1.0) -> "Drafted":
        """The sums over the turns of both, those of `other` multiplied by `factor`."""
        return Drafted(self.turns + factor * other.turns, self.verifications + factor * other.verifications)


@dataclass(slots=True)
class Learned:
    """Everything that has been observed."""

    pools: dict[Pool, Statistics] = field(default_factory=lambda: {pool: Statistics() for pool in Pool})
    workload: Workload = field(default_factory=Workload)
    kinds: dict[str, Drafted] = field(default_factory=dict)
    """By `PolicyInput.kind`, in the order of the last observations."""

    def count_drafts(self, kind: str, output_tokens: int, verifications: int) -> None:
        """Add a turn of a session of this kind."""
        rate = min(1.0, verifications / max(1, output_tokens))
        self.kinds[kind] = Drafted(1.0, rate).plus(self.kinds.pop(kind, Drafted()), MEMORY)
        if len(self.kinds) > MAX_KINDS:
            del self.kinds[next(iter(self.kinds))]

    def expected_tokens(self, kind: str) -> float:
        """Tokens per verification of a session of this kind. With few observations, it is close to that of all.

        It is the harmonic mean, because the time for an answer is proportional to the verifications per token.
        """
        every = Drafted(KIND_STRENGTH, KIND_STRENGTH / REFERENCE)
        for each in self.kinds.values():
            every = every.plus(each)
        known = self.kinds.get(kind, Drafted()).plus(every, KIND_STRENGTH / every.turns)
        return known.turns / known.verifications

    def plus(self, other: Self) -> "Learned":
        """What both have observed. If there are too many kinds, those that `other` knows are dropped first."""
        kinds: dict[str, Drafted] = {}
        for each in (other.kinds, self.kinds):
            for kind, drafted in each.items():
                kinds[kind] = drafted.plus(kinds.pop(kind, Drafted()))
        return Learned(
            {pool: self.pools[pool].plus(other.pools[pool]) for pool in Pool},
            self.workload.plus(other.workload),
            dict(list(kinds.items())[-MAX_KINDS:]),
        )

    def export(self) -> Document:
        """A JSON object for `restore`."""
        return {
            "version": FORMAT_VERSION,
            "pools": {
                pool.value: {
                    "products": list(each.moments.products),
                    "responses": list(each.moments.responses),
                    "expected": dict(each.expected),
                    "cached": dict(each.cached),
                }
                for pool, each in self.pools.items()
            },
            "workload": [self.workload.output_tokens, *self.workload.reached],
            "kinds": {kind: list(drafted) for kind, drafted in self.kinds.items()},
        }

    @classmethod
    def restore(cls, document: Document) -> "Learned | None":
        """What `export` returned; None for other objects, such as those of another version."""
        try:
            if document["version"] != FORMAT_VERSION:
                return None
            pools = {pool: _statistics(document["pools"][pool.value]) for pool in Pool}
            output_tokens, *reached = (_finite(value) for value in document["workload"])
            kinds = {kind: Drafted(*map(_finite, sums)) for kind, sums in document["kinds"].items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        plausible = all(0 < each.verifications <= each.turns for each in kinds.values())
        return (
            cls(pools, Workload(output_tokens, reached), kinds)
            if len(reached) == COUNTED_TURNS and plausible
            else None
        )


def _statistics(document: Document) -> Statistics:
    """Raises AttributeError, KeyError, TypeError or ValueError if they are not valid."""
    moments = Moments(*(list(map(_finite, document[name])) for name in ("products", "responses")))
    if (len(moments.products), len(moments.responses)) != (FEATURES**2, FEATURES):
        raise ValueError(f"{len(moments.responses)} features instead of {FEATURES}")
    expected, cached = (
        {kind: _finite(document[name][kind]) for kind in _TOKEN_KINDS} for name in ("expected", "cached")
    )
    return Statistics(moments, expected, cached)


def _finite(value: object) -> float:
    """A finite number of a JSON document. Raises ValueError for anything else."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise ValueError(f"{value!r} is not a finite number")
