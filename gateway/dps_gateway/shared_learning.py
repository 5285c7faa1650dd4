"""Sharing what a learning policy has learned between gateway processes, and with those that are started later."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from dps_gateway.config import GatewayConfig
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import LearningPolicy, Observation, Policy
from dps_gateway.session.redis import StoreUnavailable

INTERVAL_SECONDS: Final = 5.0
LIVE_SECONDS: Final = 30.0
"""A process that has not written for longer has probably ended."""

ENOUGH_TURNS: Final = 200
"""Until the running processes have observed this many turns, they also use what an ended process has learned."""

TTL_SECONDS: Final = 7 * 24 * 3600


class SharedStore(Protocol):
    """A shared store of hashes. Its methods raise StoreUnavailable."""

    async def set_field(self, key: str, field: str, value: bytes, ttl_seconds: int) -> dict[str, bytes]:
        """Set one field, and return all fields."""

    async def delete_fields(self, key: str, fields: Sequence[str]) -> None:
        """Delete fields."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one process has learned."""

    process: str
    written: float
    """Seconds since the Unix epoch."""
    turns: int
    """The number of turns that the process has observed."""
    document: dict[str, Any]

    def encode(self) -> bytes:
        return orjson.dumps({"written": self.written, "turns": self.turns, "learned": self.document})

    @classmethod
    def decode(cls, process: str, raw: bytes) -> "_Entry | None":
        """Parse the stored form. Returns None for anything else."""
        try:
            fields = orjson.loads(raw)
            return cls(process, float(fields["written"]), int(fields["turns"]), dict(fields["learned"]))
        except (KeyError, TypeError, ValueError):
            return None


class SharedLearning:
    """Passes observations to a learning policy, and exchanges what it has learned with other processes."""

    def __init__(self, store: SharedStore | None, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._process = uuid.uuid4().hex
        self._policy: Policy | None = None
        self._turns = 0
        """The number of turns that `_policy` has observed."""

    def observe(self, policy: LearningPolicy, observation: Observation) -> int | None:
        """Pass a completed turn to the policy. Returns what `LearningPolicy.observe` does."""
        self._use(policy)
        verifications = policy.observe(observation)
        self._turns += 1
        return verifications

    async def synchronize(self, policy: Policy, key: str) -> None:
        """Write what the policy has learned, and absorb what others have. Without a store, nothing is exchanged.

        Nothing changes while the store is unavailable.
        """
        if self._store is None or not isinstance(policy, LearningPolicy):
            return
        self._use(policy)
        own = _Entry(self._process, self._clock(), self._turns, policy.export())
        try:
            stored = await self._store.set_field(key, own.process, own.encode(), TTL_SECONDS)
            used, outdated = self._partitioned(stored)
            policy.absorb([entry.document for entry in used])
            if outdated:
                await self._store.delete_fields(key, [entry.process for entry in outdated])
        except StoreUnavailable:
            return

    def _use(self, policy: Policy) -> None:
        """Begin to count turns again if another policy, which has learned nothing, is used after a reload."""
        if policy is not self._policy:
            self._policy, self._turns = policy, 0

    def _partitioned(self, stored: Mapping[str, bytes]) -> tuple[list[_Entry], list[_Entry]]:
        """The entries of other processes: those to use, and those to delete.

        Of the processes that have ended, only the one that has observed most is used, and only as long as the running
        ones have not observed enough.
        """
        entries = [_Entry.decode(process, raw) for process, raw in stored.items() if process != self._process]
        others = [entry for entry in entries if entry is not None]
        live = [entry for entry in others if self._clock() - entry.written <= LIVE_SECONDS]
        ended = [entry for entry in others if entry not in live]
        if ended and self._turns + sum(entry.turns for entry in live) < ENOUGH_TURNS:
            inherited = max(ended, key=lambda entry: (min(entry.turns, ENOUGH_TURNS), entry.written))
            live.append(inherited)
            ended.remove(inherited)
        return live, ended


def learned_key(config: GatewayConfig) -> str:
    """The storage key for the policy, the model and the engines of a configuration."""
    pools = {
        name.value: config.pools[name].model_dump(mode="json", include={"endpoints", "service"})
        for name in Pool
    }
    engines = orjson.dumps([config.model.name, pools], option=orjson.OPT_SORT_KEYS)
    return f"dps:learned:{config.routing.policy}:{hashlib.sha256(engines).hexdigest()[:32]}"


async def keep_synchronized(
    learning: SharedLearning, policy: Callable[[], Policy], key: Callable[[], str]
) -> None:
    """Exchange what the policy has learned at an interval, until cancelled."""
    while True:
        await learning.synchronize(policy(), key())
        await asyncio.sleep(INTERVAL_SECONDS)
