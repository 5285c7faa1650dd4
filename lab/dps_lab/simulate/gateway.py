"""The gateway in a simulation: the real policies and the real choice of a replica, on simulated state."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from dps_gateway.acceptance import UNKNOWN, Acceptance
from dps_gateway.pool import Pool, replica_id
from dps_gateway.routing.decision import (
    CachedPrompt,
    Decision,
    LearningPolicy,
    Observation,
    Policy,
    PolicyInput,
    PoolView,
    Reason,
)
from dps_gateway.upstream.admission import Admission, Slot, SlotRequest
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import Configuration, Replica
from dps_lab.simulate.engine import VirtualEngine
from dps_lab.simulate.prompts import PlannedTurn

UNBOUNDED = 1 << 30
"""In-flight limit of a replica, too high to be reached: the simulated gateway does not queue requests."""

EXCHANGE_SECONDS = 5.0
"""How often the gateway's replicas exchange what a learning policy has learned."""


@dataclass
class SessionRecord:
    """The state of one session: the pool that served its last turn, and the length that each engine has cached."""

    pool: Pool | None = None
    held: dict[str, int] = field(default_factory=dict)
    """Length of the longest prompt that an engine has served and that is a prefix of the next, in tokens."""
    acceptance: Acceptance = UNKNOWN

    def held_tokens(self, turn: PlannedTurn) -> dict[str, int]:
        """Tokens of the prompt that are in an engine's KV cache, by the engine's id, according to this record."""
        return self.held if turn.base_tokens else {}

    def commit(self, turn: PlannedTurn, pool: Pool, replica: str) -> bool:
        """Record the replica that served a turn, by its id. Returns whether the session changed pools."""
        moved = self.pool is not None and self.pool is not pool
        if not turn.base_tokens:
            self.held.clear()
        self.held[replica] = len(turn.prompt)
        self.pool = pool
        return moved


@dataclass(frozen=True)
class Placement:
    """A routed turn. The caller reports to its gateway when the engine begins to answer it, and when it has ended."""

    decision: Decision
    engine: VirtualEngine
    gateway_replica: int
    slot: Slot
    moved: bool
    turn: PolicyInput
    view: PoolView
    sent_tokens: int
    """`sent_tokens` of the replica immediately after this turn had been sent."""

    @property
    def replica(self) -> Replica:
        """The gateway replica's observations of the engine."""
        return self.slot.replica


class VirtualGateway:
    """Gateway replicas over one session store.

    Each replica counts the requests that it relays itself, and learns only from their answers. The requests of the
    others are known from the engines' periodic load reports, and what a learning policy has learned is exchanged
    periodically, as through Redis.
    """

    def __init__(self, policy: Policy, engines: Sequence[VirtualEngine], replicas: int, seed: int) -> None:
        # Each replica has its own copy, because a learning policy has state.
        self.policies = [copy.deepcopy(policy) for _ in range(replicas)]
        self._engines = {engine.url: engine for engine in engines}
        self._pools = [
            {
                pool: EnginePool(pool, max_in_flight_per_replica=UNBOUNDED, admission=Admission(max_queued=0))
                for pool in Pool
            }
            for _ in range(replicas)
        ]
        for pool in Pool:
            self._update(pool)
        self.demand = dict.fromkeys(Pool, 0)
        """Requests in flight of each pool, including those on engines that are being stopped."""
        self._seed = seed
        self._next_exchange = EXCHANGE_SECONDS

    def place(
        self, session_id: str, number: int, turn: PlannedTurn, record: SessionRecord, kind: str
    ) -> Placement:
        """Route turn `number` of a session, counted from 0, and commit it. Any gateway replica may serve any turn.

        kind: see `PolicyInput.kind`.
        """
        rng = random.Random(f"{self._seed}/{session_id}/{number}")
        gateway_replica = rng.randrange(len(self._pools))
        pools = self._pools[gateway_replica]
        views = {
            pool: view
            for pool in Pool
            if (view := self._view(pools[pool], session_id, turn, record)) is not None
        }
        policy_input = PolicyInput(
            prompt_tokens=len(turn.prompt),
            delta_tokens=turn.delta_tokens,
            draw=rng.random(),
            number=number + 1,
            last_pool=record.pool if turn.base_tokens else None,
            pools=views,
            acceptance=record.acceptance,
            kind=kind,
        )
        decision = self.policies[gateway_replica].decide(policy_input)
        if decision.pool not in views:
            decision = Decision(decision.pool.other, Reason.FAILOVER)
        held = record.held_tokens(turn)
        slot = pools[decision.pool].take(SlotRequest([pools[decision.pool]], session=session_id, held=held))
        assert slot is not None
        replica, view = slot.replica, views[decision.pool]
        self.demand[decision.pool] += 1
        replica.prefill_tokens += view.prompt.prefill
        sent = replica.sent_tokens
        moved = record.commit(turn, decision.pool, replica.id)
        engine = self._engines[replica.url]
        return Placement(decision, engine, gateway_replica, slot, moved, policy_input, view, sent)

    def answering(self, placement: Placement) -> None:
        """Count the prompt of a turn as prefilled."""
        tokens = placement.view.prompt.prefill
        placement.replica.prefill_tokens -= tokens
        placement.replica.begun_tokens += tokens

    def release(self, placement: Placement) -> None:
        """Count a turn as ended."""
        placement.slot.release()
        self.demand[placement.decision.pool] -= 1

    @property
    def engines(self) -> list[VirtualEngine]:
        """The engines that receive requests."""
        return list(self._engines.values())

    def add(self, engine: VirtualEngine) -> None:
        """Send requests to one more engine."""
        self._engines[engine.url] = engine
        self._update(engine.pool)

    def remove(self, engine: VirtualEngine) -> None:
        """Send no more requests to an engine. Those in flight are completed."""
        del self._engines[engine.url]
        self._update(engine.pool)

    def _update(self, name: Pool) -> None:
        members = [engine for engine in self._engines.values() if engine.pool is name]
        for pools in self._pools:
            pools[name].set_endpoints(engine.url for engine in members)
            for engine in members:
                pools[name].replicas[engine.url].configuration = Configuration(engine.units)

    def poll(self) -> None:
        """Report the load of every engine to every gateway replica."""
        for url, engine in self._engines.items():
            load = engine.load
            for pools in self._pools:
                pools[engine.pool].replicas[url].report(load)

    def observe(self, placement: Placement, observed: Observation, now: float) -> int | None:
        """Pass an answered turn to the policy of the gateway replica that served it.

        Returns what is known about its drafts: see `LearningPolicy.observe`.
        """
        policy = self.policies[placement.gateway_replica]
        if not isinstance(policy, LearningPolicy):
            return observed.verifications
        verifications = policy.observe(observed)
        if now >= self._next_exchange:
            self._next_exchange = now + EXCHANGE_SECONDS
            self._exchange()
        return verifications

    def _exchange(self) -> None:
        learners = [policy for policy in self.policies if isinstance(policy, LearningPolicy)]
        documents = [learner.export() for learner in learners]
        for index, learner in enumerate(learners):
            learner.absorb(documents[:index] + documents[index + 1 :])

    def _view(
        self, pool: EnginePool, session_id: str, turn: PlannedTurn, record: SessionRecord
    ) -> PoolView | None:
        held = record.held_tokens(turn)
        writers = {link.writer.url for url in pool.replicas for link in self._engines[url].links}
        shared = max((held.get(replica_id(url), 0) for url in writers), default=0)
        return pool.view(session_id, CachedPrompt(len(turn.prompt), held, shared))
