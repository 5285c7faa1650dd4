"""The learned speed of a pool. This module performs no I/O.

The latency of a turn is modelled as a linear function of its features: a fixed time, times for the prefill and the
fetch of its prompt, a wait for the other requests of the replica, and the decoding of the answer at a time per token
that depends on the number of these requests. If an engine runs requests one after another, the wait is learned as the
duration of a whole request.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

from dps_gateway.cached_prompt import PromptTokens
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import PolicyInput, PoolView
from dps_gateway.routing.fetch_rates import FetchRates
from dps_gateway.routing.learning import Document, Observation
from dps_gateway.routing.regression import Moments


class Coefficients(NamedTuple):
    """The speed of a pool: one number for each feature of a turn, in seconds per unit of the feature."""

    fixed: float
    """Per turn."""
    prefill: float
    """Per 1,000 prefilled tokens."""
    fetch: float
    """Per 1,000 tokens that are fetched from a common prefix cache."""
    wait: float
    """Per request that waits until another one ends (see `_split`)."""
    token: float
    """Per output token."""
    token_load: float
    """Per output token and other running request."""


PRIORS: Final[Mapping[Pool, Coefficients]] = {
    Pool.SPECULATIVE: Coefficients(
        fixed=0.020, prefill=0.074, fetch=0.003, wait=0.004, token=0.0070, token_load=0.0004
    ),
    Pool.GREEDY: Coefficients(
        fixed=0.015, prefill=0.060, fetch=0.003, wait=0.004, token=0.0091, token_load=0.0004
    ),
}
"""The speeds before the first answers. They follow the time model of `dps simulate` for Qwen2.5-7B-Instruct on an A100
80 GB, with STANDALONE speculation. The wait is that of an engine that is not limited in the number of requests that it
runs at the same time."""

ASSUMED_LIMIT: Final[Mapping[Pool, float]] = {Pool.SPECULATIVE: 10.0, Pool.GREEDY: math.inf}
"""Maximum number of requests that an engine is assumed to run at the same time. A speculative engine may run requests
one after another: a burst of first turns would be queued there before the first answer shows it."""

FEATURES: Final = len(Coefficients._fields)
_WAIT: Final = Coefficients._fields.index("wait")

_STRENGTHS: Final = Coefficients(fixed=4.0, prefill=2.0, fetch=2.0, wait=30.0, token=100.0, token_load=1000.0)
"""The weights of the priors, equal to the weights of a few typical turns."""

MAX_INTERRUPTED_SHARE: Final = 0.5
"""An answer whose interruptions took a larger share of its time does not show how fast a pool decodes."""

MEMORY: Final = 0.99
"""Factor of an observation's weight for each later observation of the same pool."""

_UNCACHED_KINDS: Final = ("grown", "new", "moved")
"""Kinds of tokens of a prompt that may or may not be cached (see `_uncached`)."""

_KINDS: Final = (*_UNCACHED_KINDS, "fetchable")
"""These, and the tokens that can be fetched."""

_PRIOR_TOKENS: Final = 1000.0
"""Weight, in tokens, of the prior when the share of cached tokens is estimated: everything that can be fetched is, and
nothing else is cached."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The parts of a turn's predicted latency in one pool, in seconds."""

    queue: float
    """Prefill of the prompts that the replica has not begun to answer."""
    prompt: float
    """Prefill and fetch of the prompt."""
    idle: float
    """The rest of the latency on a replica without other requests."""
    wait: float
    """The time until other requests of the replica end, before it runs."""
    load: float
    """The time that the other running requests of the replica add."""

    @property
    def seconds(self) -> float:
        """The latency of the turn."""
        return self.queue + self.prompt + self.idle + self.wait + self.load


@dataclass(slots=True)
class Statistics:
    """What has been observed of one pool, as decayed sums."""

    moments: Moments = field(default_factory=lambda: Moments.zero(FEATURES))
    expected: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0.0))
    """Tokens that were not cached according to the sessions' records, by kind (see `_uncached`)."""
    cached: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0.0))
    """Those of them that the engine had cached nevertheless, for example as part of another session's prompt."""

    def plus(self, other: Self) -> "Statistics":
        """The statistics of the observations of both."""
        return Statistics(
            self.moments.plus(other.moments),
            {kind: self.expected[kind] + other.expected[kind] for kind in _KINDS},
            {kind: self.cached[kind] + other.cached[kind] for kind in _KINDS},
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

    def export(self) -> Document:
        """A JSON object for `restore`."""
        moments = self.moments
        return {
            "products": list(moments.products),
            "responses": list(moments.responses),
            "expected": dict(self.expected),
            "cached": dict(self.cached),
        }

    @classmethod
    def restore(cls, document: Document) -> Self:
        """The statistics that `export` returned. Raises KeyError, TypeError or ValueError for other objects."""
        products = [finite(value) for value in document["products"]]
        responses = [finite(value) for value in document["responses"]]
        if (len(products), len(responses)) != (FEATURES**2, FEATURES):
            raise ValueError(f"{len(responses)} features instead of {FEATURES}")
        expected, cached = (
            {kind: finite(document[name][kind]) for kind in _KINDS} for name in ("expected", "cached")
        )
        return cls(Moments(products, responses), expected, cached)


class PoolEstimate:
    """The speed of one pool, learned from its answers."""

    def __init__(self, pool: Pool) -> None:
        self._prior = PRIORS[pool]
        self._assumed_limit = ASSUMED_LIMIT[pool]
        self.own = Statistics()
        """The observations of this gateway process."""
        self._all = self.own
        self._others: Statistics | None = None
        self._fetch_rates = FetchRates()
        self._solution = self._prior
        self._solved = True
        """Whether `_solution` takes all observations into account. It is computed when it is needed."""

    def absorb(self, others: Statistics | None) -> None:
        """Use the observations of other gateway processes in addition, instead of those absorbed before."""
        self._others = others
        self._update()

    def observe(self, seen: Observation) -> None:
        """Learn from an answer of this pool."""
        expected = seen.expected
        uncached = _uncached(seen.prompt_tokens, seen.delta_tokens, expected)
        if seen.fetched_tokens is None:
            fetched = expected.fetchable * self._all.fetched_share()
        else:
            fetched = float(seen.fetched_tokens)
            self.own.count_fetched(expected.fetchable, fetched)
        if seen.cached_tokens is None:
            computed = self._computed(uncached) + max(0.0, expected.fetchable - fetched)
        else:
            computed = float(max(0, seen.prompt_tokens - seen.cached_tokens))
            self.own.count_cached(uncached, computed)
        prefill = (computed + self._queued(seen.queued_prefill_tokens)) / 1000
        fetch = fetched / 1000
        tokens, (running, waiting) = seen.work, _observed_split(seen)
        first = (1.0, prefill, fetch, waiting, 0.0, 0.0)
        self._observe_fetch(seen, prefill, fetch)
        moments = self.own.moments
        moments.decay(MEMORY)
        decoded = not self._interrupted(seen)
        # The duration of decoding varies in proportion to its length, so its weight is the inverse of the length.
        if seen.first_token_seconds is not None:
            moments.add(first, seen.first_token_seconds, 1.0)
            if decoded:
                answer = (0.0, 0.0, 0.0, 0.0, tokens, tokens * running)
                moments.add(answer, seen.total_seconds - seen.first_token_seconds, 1 / max(1.0, tokens))
        elif decoded:
            features = (*first[:4], tokens, tokens * running)
            moments.add(features, seen.total_seconds, 1 / (1 + tokens))
        self._update()

    def _observe_fetch(self, seen: Observation, prefill: float, fetch: float) -> None:
        """Learn the replica's transfer rate from the time that the pool's speed does not explain."""
        if not fetch:
            return
        tokens, (running, waiting) = seen.work, _observed_split(seen)
        speed = self._coefficients(None, tokens)
        known = speed.fixed + speed.prefill * prefill + speed.wait * waiting
        if seen.first_token_seconds is not None:
            self._fetch_rates.observe(seen.replica, fetch, seen.first_token_seconds - known, 1.0)
        else:
            known += (speed.token + speed.token_load * running) * tokens
            self._fetch_rates.observe(seen.replica, fetch, seen.total_seconds - known, 1 / (1 + tokens))

    def slowness(self, seen: Observation) -> float | None:
        """How long the decoding of an answer took, relative to the learned speed at its load.

        None if the answer does not show it.
        """
        if seen.first_token_seconds is None or self._interrupted(seen):
            return None
        speed = self._coefficients(seen.running_limit, seen.output_tokens)
        running, _ = _observed_split(seen)
        interruption = self.prefill_seconds(self._queued(seen.later_prefill_tokens))
        expected = interruption + (speed.token + speed.token_load * running) * seen.output_tokens
        return (seen.total_seconds - seen.first_token_seconds) / expected if expected > 0 else None

    def _interrupted(self, seen: Observation) -> bool:
        """Whether an answer took most of its time because the engine prefilled later prompts.

        The duration of such an answer does not show how fast the engine decodes.
        """
        interruption = self.prefill_seconds(self._queued(seen.later_prefill_tokens))
        return interruption > MAX_INTERRUPTED_SHARE * (seen.total_seconds - (seen.first_token_seconds or 0.0))

    def forget(self, factor: float) -> None:
        """Multiply the weights of this process's observations by `factor`."""
        self.own.moments.decay(factor)
        self._fetch_rates.decay(factor)
        self._update()

    def cost(self, turn: PolicyInput, view: PoolView, output_tokens: float) -> Cost:
        """The predicted latency of a turn with an answer of `output_tokens`. It does not fall with load or length."""
        load = _split(view.load, view.running_limit)
        return self._cost(turn, view, view.prompt, load, output_tokens)

    def predicted_seconds(self, seen: Observation) -> float:
        """The latency of an answered turn that is predicted from earlier ones and from the length of its answer."""
        return self._cost(seen, seen, seen.expected, _observed_split(seen), seen.work).seconds

    def prefill_seconds(self, tokens: float) -> float:
        """The time in which the pool prefills this number of tokens."""
        return self._coefficients(None, 0.0).prefill * tokens / 1000

    def usual(self, load: float, running_limit: int | None, output_tokens: float) -> Cost:
        """The predicted latency of an average turn without the prefill, at a given load."""
        speed = self._coefficients(running_limit, output_tokens)
        return _decoding_cost(speed, _split(load, running_limit), output_tokens)

    def _cost(
        self,
        turn: PolicyInput | Observation,
        replica: PoolView | Observation,
        expected: PromptTokens,
        load: tuple[float, float],
        output_tokens: float,
    ) -> Cost:
        """The predicted latency of a turn on a replica, which has to do `expected` for its prompt. See `_split`."""
        speed = self._coefficients(replica.running_limit, output_tokens)
        fetch = self._fetch_rates.of(replica.replica, speed.fetch)
        fetched = expected.fetchable * self._all.fetched_share()
        uncached = _uncached(turn.prompt_tokens, turn.delta_tokens, expected)
        computed = self._computed(uncached) + expected.fetchable - fetched
        return replace(
            _decoding_cost(speed, load, output_tokens),
            queue=speed.prefill * self._queued(replica.queued_prefill_tokens) / 1000,
            prompt=(speed.prefill * computed + fetch * fetched) / 1000,
        )

    def _computed(self, uncached: Mapping[str, float]) -> float:
        return sum(tokens * self._all.uncached_share(kind) for kind, tokens in uncached.items())

    def _queued(self, tokens: float) -> float:
        """The tokens of queued prompts that the engine computes, of `tokens` according to their sessions' records.

        `tokens` does not include those that can be fetched.
        """
        return tokens * self._all.uncached_share(*_UNCACHED_KINDS)

    def _update(self) -> None:
        self._all = self.own if self._others is None else self.own.plus(self._others)
        self._solved = False

    def _coefficients(self, running_limit: int | None, output_tokens: float) -> Coefficients:
        """The learned speed. Until turns under load have been observed, the limit on running requests adds to the wait.

        An engine that runs `limit` requests at the same time completes one of them in 1 / `limit` of the time of a
        turn, on average, so each request before this turn adds that much.
        """
        if not self._solved:
            solution = self._all.moments.solve(self._prior, _STRENGTHS, self._solution)
            self._solution = Coefficients(*solution)
            self._solved = True
        speed = self._solution
        limit = running_limit or self._assumed_limit
        full = speed.token_load * (running_limit - 1) if running_limit else 0.0
        observed = self._all.moments.products[_WAIT * FEATURES + _WAIT]
        prior_share = _STRENGTHS.wait / (_STRENGTHS.wait + observed)
        wait = speed.wait + prior_share * (speed.fixed + (speed.token + full) * output_tokens) / limit
        return speed._replace(wait=wait)


def _decoding_cost(speed: Coefficients, load: tuple[float, float], output_tokens: float) -> Cost:
    """The cost of a turn without that of its prompt."""
    running, waiting = load
    return Cost(
        queue=0.0,
        prompt=0.0,
        idle=speed.fixed + speed.token * output_tokens,
        wait=speed.wait * waiting,
        load=speed.token_load * output_tokens * running,
    )


def _split(load: float, running_limit: int | None) -> tuple[float, float]:
    """The requests that run beside a turn, and those that must end before it runs, of the `load` of a replica.

    If the limit on running requests is unknown, each of them may be one or the other.
    """
    if running_limit is None:
        return load, load
    return min(load, running_limit - 1), max(0.0, load - running_limit + 1)


def _observed_split(seen: Observation) -> tuple[float, float]:
    """The requests that ran beside an answered turn, and those that had to end before it ran."""
    running, _ = _split(seen.decoding_load, seen.running_limit)
    _, waiting = _split(seen.load, seen.running_limit)
    return running, waiting


def finite(value: object) -> float:
    """A finite number of a JSON document. Raises ValueError for anything else."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise ValueError(f"{value!r} is not a finite number")


def _uncached(prompt: int, delta: int, tokens: PromptTokens) -> dict[str, float]:
    """The tokens of a prompt that a pool has to prefill according to the session's record, by kind.

    grown: since the previous turn, and the rest of a page before them. new: all of a prompt without a previous turn,
    which may share a prefix with other sessions. moved: of previous turns, which the other pool served.
    """
    if delta >= prompt:
        return {"new": float(tokens.prefill)}
    grown = min(delta + tokens.page_rest, tokens.prefill)
    return {"grown": float(grown), "moved": float(tokens.prefill - grown)}
