"""The gateway in a simulation: the real policies and the real choice of a replica, on simulated state."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Policy, Reason, Turn
from dps_gateway.upstream.affinity import preferred
from dps_lab.simulate.engine import VirtualEngine
from dps_lab.simulate.prompts import PlannedTurn

UNBOUNDED = 1 << 30
"""In-flight limit of a replica, too high to be reached: the simulated gateway does not queue requests."""


@dataclass
class SessionRecord:
    """The state of one session: the pool that served its last turn."""

    pool: Pool | None = None

    def commit(self, pool: Pool) -> bool:
        """Record the pool that served a turn. Returns whether the session changed pools."""
        moved = self.pool is not None and self.pool is not pool
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


class VirtualGateway:
    """Gateway replicas over one session store. Each replica counts only the requests that it relays itself."""

    def __init__(self, policy: Policy, engines: Sequence[VirtualEngine], replicas: int, seed: int) -> None:
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
        decision = self._decide(turn, rng.random())
        in_flight = self._in_flight[replica]
        endpoints = [_Endpoint(engine, in_flight[engine.url]) for engine in self._pools[decision.pool]]
        chosen = preferred(session_id, endpoints, UNBOUNDED)
        assert chosen is not None
        in_flight[chosen.url] += 1
        return Placement(decision, chosen.engine, replica, record.commit(decision.pool))

    def release(self, placement: Placement) -> None:
        """Count a turn as ended."""
        self._in_flight[placement.gateway_replica][placement.engine.url] -= 1

    def _decide(self, turn: PlannedTurn, draw: float) -> Decision:
        decision = self._policy.decide(
            Turn(prompt_tokens=len(turn.prompt), delta_tokens=turn.delta_tokens, draw=draw)
        )
        if self._pools[decision.pool]:
            return decision
        return Decision(decision.pool.other, Reason.FAILOVER)
