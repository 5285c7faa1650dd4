"""The learned speed of a pool. This module performs no I/O.

The latency of a turn is modelled as a linear function of its features: a fixed time, times for the prefill and the
fetch of its prompt, a wait for the other requests of the replica, and the decoding of the answer at a time per token
that depends on the number of these requests. If an engine runs requests one after another, the wait is learned as the
duration of a whole request.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Observation, PolicyInput, PoolView, PromptTokens
from dps_gateway.routing.learned import FEATURES, MEMORY, UNCACHED_KINDS, Coefficients, Moments, Statistics

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

_WAIT: Final = Coefficients._fields.index("wait")

_STRENGTHS: Final = Coefficients(fixed=4.0, prefill=2.0, fetch=2.0, wait=30.0, token=100.0, token_load=1000.0)
"""The weights of the priors, equal to the weights of a few typical turns."""

MAX_INTERRUPTED_SHARE: Final = 0.5
"""An answer whose interruptions took a larger share of its time does not show how fast a pool decodes."""

UNOBSERVED_TURNS: Final = 50
"""Turns in the other pool after which a pool counts as not observed recently."""

AGING: Final = 0.98
"""Factor, per turn, of the weight of what was learned about a pool that has not been observed recently. Its estimate
returns to the prior, and it is tried again."""

LARGEST_RATIO: Final = 4.0
"""Limit of the ratio of an actual to a predicted latency in the mean error, so that one stalled turn does not dominate
it."""

_ERROR_WEIGHT: Final = 0.1
"""Weight of the last prediction in the mean error, which is an exponentially weighted mean."""

_USUAL_LOAD_WEIGHT: Final = 0.05
"""Weight of the last answer in the usual load, likewise."""

RATE_STRENGTH: Final = 50.0
"""Weight of the pool's transfer rate in that of a replica. A fetch of n thousand tokens has the weight n^2."""

MAX_REPLICAS: Final = 256
"""Maximum number of replicas with a transfer rate. The one whose last fetch is the oldest is dropped first."""


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


class PoolEstimate:
    """The speed of one pool, learned from its answers."""

    def __init__(self, pool: Pool, own: Statistics) -> None:
        """own: the observations of this gateway process, to which this adds those that follow."""
        self._prior = PRIORS[pool]
        self._assumed_limit = ASSUMED_LIMIT[pool]
        self._own = own
        self._all = own
        self._fetches: dict[str, Moments] = {}
        """Seconds by thousands of fetched tokens, by the replica's id, in the order of their last fetches. The replicas
        of a pool can differ: one may be on the node that has the storage. They are not exchanged with other processes,
        because they depend on what this process has learned about the pool."""
        self.unobserved_turns = 0
        """The turns that the other pool has answered since this one has answered one."""
        self.error = 0.0
        """Mean relative error of the recent predictions. Each prediction is made for the actual length of the answer,
        which does not depend on the pool. Errors in both directions cancel out."""
        self._usual_load = 0.0
        self._solution = self._prior
        self._solved = True
        """Whether `_solution` takes all observations into account. It is computed when it is needed."""

    def use(self, statistics: Statistics) -> None:
        """Predict from these, which are the observations of all gateway processes."""
        self._all, self._solved = statistics, False

    def observe(self, seen: Observation) -> None:
        """Learn from an answer of this pool."""
        predicted = self.cost(seen.turn, seen.view, seen.work, seen.decoding_load).seconds
        error = min(seen.total_seconds / predicted, LARGEST_RATIO) - 1 if predicted else 0.0
        self.error += _ERROR_WEIGHT * (error - self.error)
        self._usual_load += _USUAL_LOAD_WEIGHT * (seen.decoding_load - self._usual_load)
        self.unobserved_turns = 0
        expected = seen.view.prompt
        uncached = uncached_tokens(seen.turn, expected)
        if seen.fetched_tokens is None:
            fetched = expected.fetchable * self._all.fetched_share()
        else:
            fetched = float(seen.fetched_tokens)
            self._own.count_fetched(expected.fetchable, fetched)
        if seen.cached_tokens is None:
            computed = self._computed(uncached) + max(0.0, expected.fetchable - fetched)
        else:
            computed = float(max(0, seen.turn.prompt_tokens - seen.cached_tokens))
            self._own.count_cached(uncached, computed)
        prefill = (computed + self._queued(seen.view.queued_prefill_tokens)) / 1000
        fetch = fetched / 1000
        running, waiting = split(seen.view.load, seen.decoding_load, seen.view.running_limit)
        tokens = seen.work
        first = (1.0, prefill, fetch, waiting, 0.0, 0.0)
        if fetch:
            self._observe_fetch(seen, fetch, prefill, running, waiting)
        moments = self._own.moments
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

    def _observe_fetch(
        self, seen: Observation, fetch: float, prefill: float, running: float, waiting: float
    ) -> None:
        """Learn the replica's transfer rate from the time that the pool's speed does not explain.

        Other causes may have made that time longer, or even negative.
        """
        speed = self._coefficients(None, seen.work)
        known = speed.fixed + speed.prefill * prefill + speed.wait * waiting
        seconds, weight = seen.first_token_seconds, 1.0
        if seconds is None:
            known += (speed.token + speed.token_load * running) * seen.work
            seconds, weight = seen.total_seconds, 1 / (1 + seen.work)
        fetches = self._fetches.pop(seen.view.replica, None) or Moments.zero(1)
        fetches.decay(MEMORY)
        fetches.add([fetch], seconds - known, weight)
        self._fetches[seen.view.replica] = fetches
        if len(self._fetches) > MAX_REPLICAS:
            del self._fetches[next(iter(self._fetches))]

    def _fetch_rate(self, replica: str, pool_rate: float) -> float:
        """The time per 1,000 fetched tokens of a replica. With few fetches, it is close to that of the pool."""
        fetches = self._fetches.get(replica)
        if fetches is None:
            return pool_rate
        (products,), (responses,) = fetches.products, fetches.responses
        return max(0.0, (responses + RATE_STRENGTH * pool_rate) / (products + RATE_STRENGTH))

    def slowness(self, seen: Observation) -> float | None:
        """How long the decoding of an answer took, relative to the learned speed at its load.

        None if the answer does not show it.
        """
        if seen.first_token_seconds is None or self._interrupted(seen):
            return None
        speed = self._coefficients(seen.view.running_limit, seen.output_tokens)
        running, _ = split(seen.view.load, seen.decoding_load, seen.view.running_limit)
        interruption = self.prefill_seconds(self._queued(seen.later_prefill_tokens))
        expected = interruption + (speed.token + speed.token_load * running) * seen.output_tokens
        return (seen.total_seconds - seen.first_token_seconds) / expected if expected > 0 else None

    def _interrupted(self, seen: Observation) -> bool:
        """Whether an answer took most of its time because the engine prefilled later prompts.

        The duration of such an answer does not show how fast the engine decodes.
        """
        interruption = self.prefill_seconds(self._queued(seen.later_prefill_tokens))
        return interruption > MAX_INTERRUPTED_SHARE * (seen.total_seconds - (seen.first_token_seconds or 0.0))

    def forget(self) -> None:
        """Reduce the weights of this process's observations, because there are no new ones."""
        for moments in (self._own.moments, *self._fetches.values()):
            moments.decay(AGING)
        self.error *= AGING
        self._usual_load *= AGING

    def cost(
        self, turn: PolicyInput, view: PoolView, output_tokens: float, decoding_load: float | None = None
    ) -> Cost:
        """The predicted latency of a turn with an answer of `output_tokens`. It does not fall with load or length.

        decoding_load: the other requests of the replica while it decodes, if it is known that their number changes.
        """
        speed, expected = self._coefficients(view.running_limit, output_tokens), view.prompt
        fetched = expected.fetchable * self._all.fetched_share()
        computed = self._computed(uncached_tokens(turn, expected)) + expected.fetchable - fetched
        return _cost(
            speed,
            split(view.load, view.load if decoding_load is None else decoding_load, view.running_limit),
            output_tokens,
            queue=speed.prefill * self._queued(view.queued_prefill_tokens) / 1000,
            prompt=(speed.prefill * computed + self._fetch_rate(view.replica, speed.fetch) * fetched) / 1000,
        )

    def usual(self, running_limit: int | None, output_tokens: float) -> Cost:
        """The predicted latency of an average turn without the prefill, at the usual load."""
        speed, load = self._coefficients(running_limit, output_tokens), self._usual_load
        return _cost(speed, split(load, load, running_limit), output_tokens)

    def prefill_seconds(self, tokens: float) -> float:
        """The time in which the pool prefills this number of tokens."""
        return self._coefficients(None, 0.0).prefill * tokens / 1000

    def _computed(self, uncached: Mapping[str, float]) -> float:
        return sum(tokens * self._all.uncached_share(kind) for kind, tokens in uncached.items())

    def _queued(self, tokens: float) -> float:
        """The tokens of queued prompts that the engine computes, of `tokens` according to their sessions' records.

        `tokens` does not include those that can be fetched.
        """
        return tokens * self._all.uncached_share(*UNCACHED_KINDS)

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


def _cost(
    speed: Coefficients,
    load: tuple[float, float],
    output_tokens: float,
    queue: float = 0.0,
    prompt: float = 0.0,
) -> Cost:
    running, waiting = load
    return Cost(
        queue=queue,
        prompt=prompt,
        idle=speed.fixed + speed.token * output_tokens,
        wait=speed.wait * waiting,
        load=speed.token_load * output_tokens * running,
    )


def split(load: float, decoding_load: float, running_limit: int | None) -> tuple[float, float]:
    """The requests that run beside a turn, and those that must end before it runs.

    `load` are the requests of the replica when the turn is routed, `decoding_load` those while it decodes the answer.
    If the limit on running requests is unknown, each of them may be one or the other.
    """
    if running_limit is None:
        return decoding_load, load
    return min(decoding_load, running_limit - 1), max(0.0, load - running_limit + 1)


def uncached_tokens(turn: PolicyInput, expected: PromptTokens) -> dict[str, float]:
    """The tokens of a prompt that a pool has to prefill according to the session's record, by kind.

    grown: since the previous turn, and the rest of a page before them. new: all of a prompt without a previous turn,
    which may share a prefix with other sessions. moved: of previous turns, which the other pool served.
    """
    if turn.delta_tokens >= turn.prompt_tokens:
        return {"new": float(expected.prefill)}
    grown = min(turn.delta_tokens + expected.page_rest, expected.prefill)
    return {"grown": float(grown), "moved": float(expected.prefill - grown)}
