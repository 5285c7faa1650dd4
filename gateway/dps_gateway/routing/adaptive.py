"""The policy `Adaptive`: choose the pool with the lower predicted cost, learned from answers. No I/O."""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Final

from dps_gateway.acceptance import KNOWN_WEIGHT, REFERENCE
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import (
    Decision,
    Document,
    LearningPolicy,
    Observation,
    PolicyInput,
    PoolView,
    Reason,
)
from dps_gateway.routing.estimates import UNOBSERVED_TURNS, Cost, PoolEstimate
from dps_gateway.routing.learned import Learned

EXTERNAL_SHARE: Final = 1.5
"""Weight of the time that a turn adds to the other requests of its replica, relative to its own latency."""

QUEUE_SHARE: Final = 4.0
"""Weight of a wait until other requests end, likewise. It is larger, because all later requests wait longer as well."""

HORIZON: Final = 0.5
"""Weight of the turns that are expected to follow in the same pool, relative to the present turn."""

EXPLORATION: Final = 0.01
"""Share of the turns that are sent to the other pool if that has not been observed recently, or if the acceptance of
the session is not known."""

EXPLORATION_LIMIT: Final = 4.0
"""A turn explores a pool only if its predicted latency there is at most this multiple of the lower one."""

MARGIN: Final = 0.1
"""A predicted gain must exceed this share of the cost, or the turn is routed as by `Sticky`."""

ERROR_MULTIPLE: Final = 2.0
"""A predicted gain must also exceed this multiple of the recent error of the predictions."""


class Adaptive(LearningPolicy):
    """Choose the pool in which the turn and those that are expected to follow cost the least time.

    The cost includes the time that the turn adds to other requests of the replica. The speeds of the pools are learned
    from completed turns. docs/routing.md describes the rules.
    """

    def __init__(self) -> None:
        self._own = Learned()
        """What this process has observed."""
        self._others: Learned | None = None
        """What the other processes have observed."""
        self._all = self._own
        self._estimates = {pool: PoolEstimate(pool, self._own.pools[pool]) for pool in Pool}

    def decide(self, turn: PolicyInput, /) -> Decision:
        """The decision. It depends only on the turn and on what has been observed and absorbed."""
        views = {pool: view for pool, view in turn.pools.items() if view.ready_replicas}
        if not views:
            return Decision(turn.last_pool or Pool.GREEDY, Reason.FIXED)
        expected = turn.acceptance.expected_tokens(self._all.expected_tokens(turn.kind), turn.number)
        answer = self._all.workload.answer_tokens
        work = {Pool.SPECULATIVE: answer * REFERENCE / expected, Pool.GREEDY: answer}
        turn_costs = {
            pool: self._estimates[pool].cost(turn, view, work[pool]) for pool, view in views.items()
        }
        predicted = {pool: cost.seconds for pool, cost in turn_costs.items()}
        totals = {
            pool: self._total(turn, pool, view, turn_costs[pool], work[pool]) for pool, view in views.items()
        }
        chosen, reason = min(totals, key=lambda pool: totals[pool]), Reason.PREDICTED_FASTER
        default = _sticky(turn, views)
        if default is not chosen:
            gain = totals[default] - totals[chosen]
            if gain < self._uncertainty_seconds(chosen, default, predicted) + MARGIN * totals[default]:
                chosen, reason = default, Reason.FIXED
        if self._explores(turn, views, chosen, predicted):
            chosen, reason = chosen.other, Reason.PREDICTED_FASTER
        return Decision(chosen, reason, predicted, expected)

    def verifications(self, observation: Observation, /) -> int | None:
        """The verifications of drafts that yielded an answer; None if they are not known.

        If the engine reports none, they are inferred from the time per token, which is in proportion to them. What is
        then learned of a session is its acceptance relative to that of the pool's other recent sessions.
        """
        tokens, reported = observation.output_tokens, observation.verifications
        if reported is not None:
            return reported or None
        slowness = self._estimates[observation.pool].slowness(observation)
        if observation.pool is Pool.GREEDY or slowness is None:
            return None
        inferred = tokens / REFERENCE * min(max(slowness, 1 / REFERENCE), REFERENCE)
        return round(inferred) if inferred >= 1 else None

    def observe(self, observation: Observation, /) -> int | None:
        pool, turn = observation.pool, observation.turn
        verifications = self.verifications(observation)
        estimate, other = self._estimates[pool], self._estimates[pool.other]
        estimate.observe(observation)
        other.unobserved_turns += 1
        if ages := other.unobserved_turns > UNOBSERVED_TURNS:
            other.forget()
        self._own.workload.observe(turn.number, observation.output_tokens)
        if verifications is not None:
            self._own.count_drafts(turn.kind, observation.output_tokens, verifications)
        self._combine(Pool if ages else [pool])
        return verifications

    def export(self) -> Document:
        return self._own.export()

    def absorb(self, documents: Iterable[Document], /) -> None:
        restored = [learned for document in documents if (learned := Learned.restore(document)) is not None]
        self._others = reduce(lambda total, each: each.plus(total), restored) if restored else None
        self._combine(Pool)

    def _combine(self, changed: Iterable[Pool]) -> None:
        """Use what all processes have observed. `changed` are the pools whose statistics have changed."""
        self._all = self._own if self._others is None else self._own.plus(self._others)
        for pool in changed:
            self._estimates[pool].use(self._all.pools[pool])

    def _total(self, turn: PolicyInput, pool: Pool, view: PoolView, now: Cost, work: float) -> float:
        """The seconds that this turn and the expected following ones take in a pool and add to other requests.

        `now` is the predicted cost of this turn.
        """
        usual = self._estimates[pool].usual(view.running_limit, work)
        following = usual.idle + usual.wait * (1 + QUEUE_SHARE) + usual.load * (1 + EXTERNAL_SHARE)
        return (
            now.queue
            + (now.prompt + self._displaced(turn, pool, view)) * (1 + EXTERNAL_SHARE * view.load)
            + now.idle
            + now.wait * (1 + QUEUE_SHARE)
            + now.load * (1 + EXTERNAL_SHARE)
            + HORIZON * self._all.workload.turns_after(turn.number) * following
        )

    def _displaced(self, turn: PolicyInput, pool: Pool, view: PoolView) -> float:
        """The seconds in which the engine prefills the tokens that it has to evict for this turn again.

        If the requests in progress need more memory than there is, their prefixes are evicted, or they wait until
        others end. An evicted prefix is assumed to be needed again, because its session is in progress.
        """
        displaced = min(max(0.0, turn.prompt_tokens - view.free_tokens), turn.prompt_tokens)
        return self._estimates[pool].prefill_seconds(displaced)

    def _uncertainty_seconds(self, best: Pool, default: Pool, predicted: Mapping[Pool, float]) -> float:
        """The part, in seconds, of the gain of `best` over `default` that errors of the predictions may explain.

        Only errors that made the gain appear too large count: `best` was slower than predicted, or `default` faster. A
        pool that is slower than predicted must not keep its sessions because of that.
        """
        slower = ERROR_MULTIPLE * max(0.0, self._estimates[best].error)
        faster = ERROR_MULTIPLE * max(0.0, -self._estimates[default].error)
        # Without the limit, the uncertainty could grow faster with the load of `default` than the gain does, so that
        # more load on a pool would attract turns.
        return slower * predicted[best] + min(faster, 1 - MARGIN) * predicted[default]

    def _explores(
        self, turn: PolicyInput, views: Mapping[Pool, PoolView], chosen: Pool, predicted: Mapping[Pool, float]
    ) -> bool:
        """Whether the turn is sent to the pool that has not been chosen.

        It shows how fast that pool is at present, or how many drafts of the session are accepted.
        """
        other = chosen.other
        unknown = other is Pool.SPECULATIVE and turn.acceptance.weight(turn.number) < KNOWN_WEIGHT
        return (
            turn.draw < EXPLORATION
            and other in views
            # A request in progress will show how fast the pool is. It may also be the reason why the pool has not been
            # observed.
            and not views[other].load
            and (self._estimates[other].unobserved_turns >= UNOBSERVED_TURNS or unknown)
            and predicted[other] <= EXPLORATION_LIMIT * predicted[chosen]
        )


def _sticky(turn: PolicyInput, views: Mapping[Pool, PoolView]) -> Pool:
    """The decision of `Sticky`: the pool that served the previous turn, or else the less loaded one."""
    if turn.last_pool is not None and turn.last_pool in views:
        return turn.last_pool
    return min(views, key=lambda pool: views[pool].load)
