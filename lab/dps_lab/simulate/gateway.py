"""The gateway's part of a simulation: its own policies and its own choice of a replica, on simulated state."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dps_gateway.routing.decision import Decision, Policy, Pool, PoolView, Reason, Turn
from dps_gateway.upstream.affinity import preferred
from dps_lab.simulate.engine import VirtualEngine
from dps_lab.simulate.prompts import PlannedTurn

UNBOUNDED = 1 << 30
"""In-flight limit of a replica: the simulated gateway queues nothing itself."""


@dataclass
class SessionRecord:
    """What the session store keeps of one session: the prompt length (tokens) last sent to each pool."""

    seen_tokens: dict[Pool, int] = field(default_factory=dict)
    pool: Pool | None = None

    def uncached_tokens(self, turn: PlannedTurn, pool: Pool) -> int:
        """Prompt tokens that `pool` has not seen from this session."""
        return len(turn.prompt) - min(self.seen_tokens.get(pool, 0), turn.base_tokens)

    def commit(self, turn: PlannedTurn, pool: Pool) -> bool:
        """Record where a turn went; whether the session changed pools."""
        if turn.base_tokens == 0:
            self.seen_tokens.clear()
        moved = self.pool is not None and self.pool is not pool
        self.pool = pool
        self.seen_tokens[pool] = len(turn.prompt)
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


class VirtualGateway:
    """Gateway replicas over one session store. Each replica counts only the requests that it relays itself."""

    def __init__(
        self, policy: Policy, engines: Sequence[VirtualEngine], replicas: int, seed: int
    ) -> None:
        self._policy = policy
        self._pools: Mapping[Pool, list[VirtualEngine]] = {
            pool: [engine for engine in engines if engine.pool is pool] for pool in Pool
        }
        self._in_flight: list[Counter[str]] = [Counter() for _ in range(replicas)]
        self._seed = seed

    def place(self, session_id: str, number: int, turn: PlannedTurn, record: SessionRecord) -> Placement:
        """Route turn `number` of a session, and commit it. Any gateway replica may serve any turn."""
        rng = random.Random(f"{self._seed}/{session_id}/{number}")
        replica = rng.randrange(len(self._in_flight))
        decision = self._decide(turn, record, replica, rng.random())
        in_flight = self._in_flight[replica]
        endpoints = [_Endpoint(engine, in_flight[engine.url]) for engine in self._pools[decision.pool]]
        chosen = preferred(session_id, endpoints, UNBOUNDED)
        assert chosen is not None
        in_flight[chosen.url] += 1
        return Placement(decision, chosen.engine, replica, record.commit(turn, decision.pool))

    def release(self, placement: Placement) -> None:
        """Count a turn as ended."""
        self._in_flight[placement.gateway_replica][placement.engine.url] -= 1

    def _decide(self, turn: PlannedTurn, record: SessionRecord, replica: int, draw: float) -> Decision:
        views = {
            pool: PoolView(
                uncached_tokens=record.uncached_tokens(turn, pool),
                ready_replicas=len(engines),
                in_flight=sum(self._in_flight[replica][engine.url] for engine in engines),
            )
            for pool, engines in self._pools.items()
        }
        decision = self._policy.decide(
            Turn(
                prompt_tokens=len(turn.prompt),
                delta_tokens=turn.delta_tokens,
                max_output_tokens=len(turn.answer),
                draw=draw,
                pools=views,
            )
        )
        if self._pools[decision.pool]:
            return decision
        return Decision(decision.pool.other, Reason.FAILOVER)
