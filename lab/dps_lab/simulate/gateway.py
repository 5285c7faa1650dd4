"""The gateway in a simulation: the real policies and the real choice of a replica, on simulated state."""

import copy
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Policy, PoolView, Reason, Turn
from dps_gateway.routing.learning import LearningPolicy, Observation
from dps_gateway.upstream.affinity import preferred
from dps_lab.simulate.engine import FETCH_THRESHOLD_TOKENS, VirtualEngine
from dps_lab.simulate.prompts import PlannedTurn

UNBOUNDED = 1 << 30
"""In-flight limit of a replica, too high to be reached: the simulated gateway does not queue requests."""

EXCHANGE_SECONDS = 5.0
"""How often the gateway's replicas exchange what a learning policy has learned."""


@dataclass
class SessionRecord:
    """The state of one session: the pool that served its last turn, and the length that each pool has cached."""

    pool: Pool | None = None
    seen: dict[Pool, int] = field(default_factory=dict)
    """Length of the longest prompt that each pool has served and that is a prefix of the next, in tokens."""

    def uncached_tokens(self, turn: PlannedTurn, pool: Pool) -> int:
        """Tokens of the prompt that are not in the pool's KV cache, according to this record."""
        known = self.seen.get(pool, 0) if turn.base_tokens else 0
        return len(turn.prompt) - known

    def commit(self, turn: PlannedTurn, pool: Pool) -> bool:
        """Record the pool that served a turn. Returns whether the session changed pools."""
        moved = self.pool is not None and self.pool is not pool
        if not turn.base_tokens:
            self.seen.clear()
        self.seen[pool] = len(turn.prompt)
        self.pool = pool
        return moved


@dataclass(frozen=True)
class _Endpoint:
    engine: VirtualEngine
    in_flight: int

    @property
    def url(self) -> str:
        return self.engine.url


@dataclass(frozen=True)
class Placement:
    """A routed turn. `release` must be called with it when the turn has ended."""

    decision: Decision
    engine: VirtualEngine
    gateway_replica: int
    moved: bool
    view: PoolView
    number: int


class VirtualGateway:
    """Gateway replicas over one session store.

    Each replica counts only the requests that it relays itself, and learns only from their answers; what a learning
    policy has learned is exchanged periodically, as through Redis.
    """

    def __init__(self, policy: Policy, engines: Sequence[VirtualEngine], replicas: int, seed: int) -> None:
        # Each replica has its own copy, because a learning policy has state.
        self._policies = [copy.deepcopy(policy) for _ in range(replicas)]
        self._pools: Mapping[Pool, list[VirtualEngine]] = {
            pool: [engine for engine in engines if engine.pool is pool] for pool in Pool
        }
        self._in_flight: list[Counter[str]] = [Counter() for _ in range(replicas)]
        self._seed = seed
        self._next_exchange = EXCHANGE_SECONDS

    def place(self, session_id: str, number: int, turn: PlannedTurn, record: SessionRecord) -> Placement:
        """Route turn `number` of a session, counted from 0, and commit it. Any gateway replica may serve any turn."""
        rng = random.Random(f"{self._seed}/{session_id}/{number}")
        replica = rng.randrange(len(self._in_flight))
        in_flight = self._in_flight[replica]
        chosen = {pool: self._replica(pool, session_id, in_flight) for pool in Pool}
        views = {
            pool: self._view(pool, turn, record, in_flight[engine.url])
            for pool, engine in chosen.items()
            if engine is not None
        }
        decision = self._decide(
            self._policies[replica],
            Turn(
                prompt_tokens=len(turn.prompt),
                delta_tokens=turn.delta_tokens,
                draw=rng.random(),
                number=number + 1,
                last_pool=record.pool if turn.base_tokens else None,
                pools=views,
            ),
        )
        engine = chosen[decision.pool]
        assert engine is not None
        in_flight[engine.url] += 1
        moved = record.commit(turn, decision.pool)
        return Placement(decision, engine, replica, moved, views[decision.pool], number + 1)

    def release(self, placement: Placement) -> None:
        """Count a turn as ended."""
        self._in_flight[placement.gateway_replica][placement.engine.url] -= 1

    def observe(self, placement: Placement, observed: Observation, now: float) -> None:
        """Pass an answered turn to the policy of the gateway replica that served it."""
        policy = self._policies[placement.gateway_replica]
        if isinstance(policy, LearningPolicy):
            policy.observe(observed)
            if now >= self._next_exchange:
                self._next_exchange = now + EXCHANGE_SECONDS
                self._exchange()

    def _exchange(self) -> None:
        learners = [policy for policy in self._policies if isinstance(policy, LearningPolicy)]
        documents = [learner.export() for learner in learners]
        for index, learner in enumerate(learners):
            learner.absorb(documents[:index] + documents[index + 1 :])

    def _replica(self, pool: Pool, session_id: str, in_flight: Counter[str]) -> VirtualEngine | None:
        endpoints = [_Endpoint(engine, in_flight[engine.url]) for engine in self._pools[pool]]
        chosen = preferred(session_id, endpoints, UNBOUNDED)
        return None if chosen is None else chosen.engine

    def _view(self, pool: Pool, turn: PlannedTurn, record: SessionRecord, in_flight: int) -> PoolView:
        uncached = record.uncached_tokens(turn, pool)
        fetchable = uncached - record.uncached_tokens(turn, pool.other)
        shared = any(link.writer.pool is not pool for engine in self._pools[pool] for link in engine.links)
        return PoolView(
            ready_replicas=len(self._pools[pool]),
            in_flight=in_flight,
            queued=0,
            queued_prefill_tokens=0,
            uncached_tokens=uncached,
            fetchable_tokens=fetchable if shared and fetchable >= FETCH_THRESHOLD_TOKENS else 0,
        )

    def _decide(self, policy: Policy, turn: Turn) -> Decision:
        decision = policy.decide(turn)
        if self._pools[decision.pool]:
            return decision
        return Decision(decision.pool.other, Reason.FAILOVER)
