"""The policy `Adaptive`: choose the pool with the lower predicted cost, learned from answers. No I/O."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Final, Self, TypeVar

from dps_gateway.acceptance import KNOWN_WEIGHT, REFERENCE
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, PolicyInput, PoolView, Reason
from dps_gateway.routing.estimates import Cost, PoolEstimate, Statistics, finite
from dps_gateway.routing.learning import Document, Observation
from dps_gateway.routing.priors import Kinds, Turns, combined, count, expected_tokens

FORMAT_VERSION: Final = 4
"""Contained in every exported document. Documents of other versions are ignored."""

EXTERNAL_SHARE: Final = 1.5
"""Weight of the time that a turn adds to the other requests of its replica, relative to its own latency."""

QUEUE_SHARE: Final = 4.0
"""Weight of a wait until other requests end, likewise. It is larger, because all later requests wait longer as well."""

HORIZON: Final = 0.5
"""Weight of the turns that are expected to follow in the same pool, relative to the present turn."""

EXPLORATION: Final = 0.01
"""Share of the turns that are sent to the other pool if that has not been observed recently, or if the acceptance of
the session is not known."""

UNOBSERVED_TURNS: Final = 50
"""Turns in the other pool after which a pool counts as not observed recently."""

AGING: Final = 0.98
"""Factor, per turn, of the weight of what was learned about a pool that has not been observed recently. Its estimate
returns to the prior, and it is tried again."""

EXPLORATION_LIMIT: Final = 4.0
"""A turn explores a pool only if its predicted latency there is at most this multiple of the lower one."""

MARGIN: Final = 0.1
"""A predicted gain must exceed this share of the cost, or the turn is routed as by `Sticky`."""

ERROR_MULTIPLE: Final = 2.0
"""A predicted gain must also exceed this multiple of the recent error of the predictions."""

LARGEST_RATIO: Final = 4.0
"""Limit of the ratio of an actual to a predicted latency in the mean error, so that one stalled turn does not dominate
it."""

COUNTED_TURNS: Final = 32
"""Turns of a session with this or a higher number are counted together."""

_MEMORY: Final = 0.99
"""Factor of the weight of an answered turn in `Workload`, for each later one."""

_USUAL_LOAD_WEIGHT: Final = 0.05
"""Weight of the last answer in a pool's usual load, which is an exponentially weighted mean."""

_ERROR_WEIGHT: Final = 0.1
"""Weight of the last prediction in a pool's mean error, likewise."""


@dataclass(slots=True)
class Workload:
    """Decayed sums over the answered turns. The initial values are a weak prior."""

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

    def observe(self, seen: Observation) -> None:
        """Count an answered turn."""
        self.reached = [_MEMORY * count for count in self.reached]
        self.reached[min(seen.number, COUNTED_TURNS) - 1] += 1
        self.output_tokens = self.output_tokens * _MEMORY + seen.output_tokens

    def plus(self, other: Self) -> "Workload":
        """The sums over the turns of both."""
        return Workload(
            self.output_tokens + other.output_tokens,
            [own + others for own, others in zip(self.reached, other.reached, strict=True)],
        )


S = TypeVar("S", Statistics, Workload)


class Adaptive:
    """Choose the pool in which the turn and those that are expected to follow cost the least time.

    The cost includes the time that the turn adds to other requests of the replica. The speeds of the pools are learned
    from completed turns. docs/routing.md describes the rules.
    """

    def __init__(self) -> None:
        self._estimates = {pool: PoolEstimate(pool) for pool in Pool}
        self._own_workload = Workload()
        self._workload = self._own_workload
        self._others_workload: Workload | None = None
        self._usual_load = dict.fromkeys(Pool, 0.0)
        self._error = dict.fromkeys(Pool, 0.0)
        """Mean relative error of the recent predictions for each pool. Each prediction is made for the actual length of
        the answer, which does not depend on the pool. Errors in both directions cancel out."""
        self._own_kinds: Kinds = {}
        self._others_kinds: list[Kinds] = []
        self._kinds = self._own_kinds
        self._unobserved = dict.fromkeys(Pool, 0)

    def decide(self, turn: PolicyInput, /) -> Decision:
        """The decision. It depends only on the turn and on what has been observed and absorbed."""
        views = {pool: view for pool, view in turn.pools.items() if view.ready_replicas}
        if not views:
            return Decision(turn.last_pool or Pool.GREEDY, Reason.FIXED)
        prior = expected_tokens(self._kinds, turn.kind)
        expected = turn.acceptance.expected_tokens(prior, turn.number)
        answer = self._workload.answer_tokens
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

    def drafted(self, observation: Observation, /) -> tuple[int, int] | None:
        """The tokens of an answer and the verifications of drafts that yielded them; None if they are not known.

        If the engine reports none, they are inferred from the time per token, which is in proportion to them. What is
        then learned of a session is its acceptance relative to that of the pool's other recent sessions.
        """
        tokens, reported = observation.output_tokens, observation.verifications
        if reported is not None:
            return (tokens, reported) if reported else None
        slowness = self._estimates[observation.pool].slowness(observation)
        if observation.pool is Pool.GREEDY or slowness is None:
            return None
        inferred = tokens / REFERENCE * min(max(slowness, 1 / REFERENCE), REFERENCE)
        return (tokens, round(inferred)) if inferred >= 1 else None

    def observe(self, observation: Observation, /) -> None:
        """Learn from a completed turn."""
        pool, drafted = observation.pool, self.drafted(observation)
        predicted = self._estimates[pool].predicted_seconds(observation)
        error = min(observation.total_seconds / predicted, LARGEST_RATIO) - 1 if predicted else 0.0
        self._error[pool] += _ERROR_WEIGHT * (error - self._error[pool])
        self._estimates[pool].observe(observation)
        self._own_workload.observe(observation)
        if drafted is not None:
            count(self._own_kinds, observation.kind, *drafted)
        self._usual_load[pool] += _USUAL_LOAD_WEIGHT * (observation.decoding_load - self._usual_load[pool])
        self._unobserved[pool] = 0
        self._unobserved[pool.other] += 1
        if self._unobserved[pool.other] > UNOBSERVED_TURNS:
            self._estimates[pool.other].forget(AGING)
            self._error[pool.other] *= AGING
            self._usual_load[pool.other] *= AGING
        self._combine()

    def export(self) -> Document:
        """What this instance has learned from its own observations, for the other replicas."""
        workload = self._own_workload
        return {
            "version": FORMAT_VERSION,
            "pools": {pool.value: estimate.own.export() for pool, estimate in self._estimates.items()},
            "workload": [workload.output_tokens, *workload.reached],
            "kinds": {kind: list(turns) for kind, turns in self._own_kinds.items()},
        }

    def absorb(self, documents: Iterable[Document], /) -> None:
        """Replace what was absorbed before by what the other replicas have learned."""
        restored = [parts for document in documents if (parts := _restore(document)) is not None]
        for pool, estimate in self._estimates.items():
            estimate.absorb(_sum([pools[pool] for pools, _, _ in restored]))
        self._others_workload = _sum([workload for _, workload, _ in restored])
        self._others_kinds = [kinds for _, _, kinds in restored]
        self._combine()

    def _combine(self) -> None:
        own, others = self._own_workload, self._others_workload
        self._workload = own if others is None else own.plus(others)
        self._kinds = combined(self._own_kinds, self._others_kinds) if self._others_kinds else self._own_kinds

    def _total(self, turn: PolicyInput, pool: Pool, view: PoolView, now: Cost, work: float) -> float:
        """The seconds that this turn and the expected following ones take in a pool and add to other requests.

        `now` is the predicted cost of this turn.
        """
        usual = self._estimates[pool].usual(self._usual_load[pool], view.running_limit, work)
        following = usual.idle + usual.wait * (1 + QUEUE_SHARE) + usual.load * (1 + EXTERNAL_SHARE)
        return (
            now.queue
            + (now.prompt + self._displaced(turn, pool, view)) * (1 + EXTERNAL_SHARE * view.load)
            + now.idle
            + now.wait * (1 + QUEUE_SHARE)
            + now.load * (1 + EXTERNAL_SHARE)
            + HORIZON * self._workload.turns_after(turn.number) * following
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
        slower = ERROR_MULTIPLE * max(0.0, self._error[best])
        faster = ERROR_MULTIPLE * max(0.0, -self._error[default])
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
            and (self._unobserved[other] >= UNOBSERVED_TURNS or unknown)
            and predicted[other] <= EXPLORATION_LIMIT * predicted[chosen]
        )


def _sticky(turn: PolicyInput, views: Mapping[Pool, PoolView]) -> Pool:
    """The decision of `Sticky`: the pool that served the previous turn, or else the less loaded one."""
    if turn.last_pool is not None and turn.last_pool in views:
        return turn.last_pool
    return min(views, key=lambda pool: views[pool].load)


def _restore(document: Document) -> tuple[dict[Pool, Statistics], Workload, Kinds] | None:
    try:
        if document["version"] != FORMAT_VERSION:
            return None
        pools = {pool: Statistics.restore(document["pools"][pool.value]) for pool in Pool}
        output_tokens, *reached = (finite(value) for value in document["workload"])
        if len(reached) != COUNTED_TURNS:
            raise ValueError(f"{len(reached)} numbers of turns instead of {COUNTED_TURNS}")
        kinds = {kind: Turns(*map(finite, sums)) for kind, sums in document["kinds"].items()}
        if not all(0 < turns.verifications <= turns.turns for turns in kinds.values()):
            raise ValueError("a number of verifications per token is not between 0 and 1")
        return pools, Workload(output_tokens, reached), kinds
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _sum(parts: list[S]) -> S | None:
    return reduce(lambda total, each: total.plus(each), parts) if parts else None
