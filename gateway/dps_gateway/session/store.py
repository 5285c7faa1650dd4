"""Session records, read and committed: Redis is authoritative, what replicas have in mind bridges its absence.

A request never fails because of its session's state. The worst that can happen is that ΔL is taken to be L.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.keys import Pointer, is_record_key, pointer_key, record_key, record_prefix
from dps_gateway.session.mirror import Mirror
from dps_gateway.session.record import Point, Record

FAILED_CALLS: Final = 2
"""Calls of one commit that may fail. The first may just have been late, and no other replica sees the turn before."""

COMMIT_ATTEMPTS: Final = 8
"""Compare-and-set tries of one commit. Each loss means that another turn of the session was committed."""


class StateSource(StrEnum):
    """Where a turn's session state came from (response header `x-dps-state`)."""

    REDIS = "redis"
    MIRROR = "mirror"
    NONE = "none"


class StoreUnavailable(Exception):
    """The store did not answer in time, or answered that it cannot."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The first pointer that a search found: its rank among the keys, its value, and the record it names."""

    rank: int
    pointer: bytes
    record: bytes | None


class Backend(Protocol):
    """A shared key-value store. Every method raises StoreUnavailable instead of waiting long."""

    async def get(self, key: str) -> bytes | None: ...

    async def find(self, pointer_keys: list[str], record_prefix: str) -> Hit | None: ...

    async def swap(
        self,
        key: str,
        expected: bytes | None,
        value: bytes,
        ttl_seconds: int,
        pointer: tuple[str, bytes] | None,
    ) -> tuple[bool, bytes | None]:
        """Replace `expected` by `value` and write the pointer; or (False, what is there instead)."""

    async def delete(self, key: str) -> bool: ...


class Peers(Protocol):
    """The other replicas."""

    async def values(self, keys: list[str]) -> list[dict[str, bytes]]:
        """What each of them has in mind of these keys. Who does not answer soon has nothing; never raises."""

    async def tell(self, entries: dict[str, bytes]) -> None:
        """Have each of them keep in mind what Redis did not take. Who does not answer soon is not told."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was read of a session, to decide by and to commit against."""

    source: StateSource
    session: SessionId | None = None
    record: Record | None = None
    raw: bytes | None = None
    point: Point | None = None
    """The point at which a search by history found the session."""


class SessionStore:
    """Reads and commits the records of sessions. Never raises for an absent backend, except in `delete`."""

    def __init__(
        self,
        backend: Backend | None,
        mirror: Mirror,
        ttl_seconds: int,
        peers: Peers | None = None,
    ) -> None:
        self._backend = backend
        self._mirror = mirror
        self._peers = peers
        self.ttl_seconds = ttl_seconds

    async def read(self, scope: Scope, session: SessionId) -> Snapshot:
        """What is known of a session that the client named."""
        key = record_key(scope, session)
        if self._backend is not None:
            try:
                raw = await self._backend.get(key)
                return Snapshot(StateSource.REDIS, session, self._with_unwritten(key, raw), raw)
            except StoreUnavailable:
                pass
        record = await self._in_mind(key)
        return Snapshot(self._absent(record is not None), session, record)

    async def find(self, scope: Scope, tag: str, digests: list[str]) -> Snapshot:
        """The session whose history holds the first of these prefixes that anybody wrote."""
        keys = [pointer_key(scope, tag, digest) for digest in digests]
        prefix = record_prefix(scope, tag)
        source: StateSource | None = None
        hit: Hit | None = None
        if self._backend is not None:
            try:
                hit = await self._backend.find(keys, prefix)
                source = StateSource.REDIS
            except StoreUnavailable:
                pass
        others = await self._others(keys) if source is None else []
        for rank, key in enumerate(keys[: hit.rank if hit else None]):
            value = self._mirror.get(key) if source is None else self._mirror.unwritten(key)
            value = value or next((known[key] for known in others if key in known), None)
            if value is not None:
                hit = Hit(rank, value, None)
                break
        pointer = Pointer.decode(hit.pointer) if hit else None
        if hit is None or pointer is None:
            return Snapshot(source or self._absent(known=False))
        key = record_key(scope, pointer.session)
        raw = hit.record if source else None
        record = self._with_unwritten(key, raw) if source else await self._in_mind(key)
        return Snapshot(source or self._absent(known=True), pointer.session, record, raw, pointer.point)

    async def commit(
        self,
        scope: Scope,
        snapshot: Snapshot,
        session: SessionId,
        base: Record,
        point: Point,
        *,
        span: str = "",
        pointed: bool = False,
    ) -> None:
        """Remember that an engine has begun to answer `point`.

        `base` is what a record starts from that is not there (a new session, one that left another's history,
        one that Redis lost). `pointed`: later prompts may find the session by this point.
        """
        pointer = Pointer(session, point).encode() if pointed else None
        await self._update(
            record_key(scope, session),
            snapshot if snapshot.session == session else None,
            lambda record: (record or base).with_point(point, span),
            (pointer_key(scope, session.tag, point.digest), pointer) if pointer else None,
        )

    async def amend(self, scope: Scope, session: SessionId, change: Callable[[Record], Record]) -> None:
        """Change the record of a session that is there, as when the engine knows better."""
        snapshot = await self.read(scope, session)
        if snapshot.record is not None:
            await self._update(
                record_key(scope, session), snapshot, lambda record: change(record or Record(())), None
            )

    async def flush(self) -> int:
        """Write what could not be written when it was due; how much that was. Stops at the first refusal.

        Another gateway does not see a turn until its commit is written: the sooner, the better.
        """
        if self._backend is None:
            return 0
        flushed = 0
        try:
            for key in self._mirror.unwritten_keys():
                current = await self._backend.get(key)
                unwritten = self._mirror.unwritten(key)
                if unwritten is None:  # a turn of the session has just done it
                    continue
                value = self._joined(key, current, unwritten)
                done, _ = await self._backend.swap(key, current, value, self.ttl_seconds, None)
                # A session that has gone on meanwhile has something new to write: the next time.
                if done and self._mirror.unwritten(key) == unwritten:
                    self._mirror.written(key, value, self.ttl_seconds)
                    flushed += 1
        except StoreUnavailable:
            pass
        return flushed

    def take(self, entries: Mapping[str, bytes]) -> None:
        """Keep in mind what another replica could not write, and write it when it is due: now, if Redis is there.

        Redis may be away for one replica alone. The others, which still read there, have to hear of its turns.
        """
        for key, value in entries.items():
            if is_record_key(key):
                record = _merged(_decode(self._mirror.get(key)), _decode(value))
                value = record.encode() if record is not None else value
            self._mirror.put(key, value, None, self.ttl_seconds, written=self._backend is None)

    async def delete(self, scope: Scope, session: SessionId) -> bool:
        """Forget a session; True if it was known. Raises StoreUnavailable."""
        key = record_key(scope, session)
        here = self._mirror.delete(key)
        return await self._backend.delete(key) if self._backend is not None else here

    async def _update(
        self,
        key: str,
        snapshot: Snapshot | None,
        change: Callable[[Record | None], Record],
        pointer: tuple[str, bytes] | None,
    ) -> None:
        record = snapshot.record if snapshot else None
        if self._backend is not None:
            expected = snapshot.raw if snapshot and snapshot.source is StateSource.REDIS else None
            failures = 0
            for _ in range(COMMIT_ATTEMPTS):
                value = change(record).encode()
                try:
                    done, current = await self._backend.swap(key, expected, value, self.ttl_seconds, pointer)
                except StoreUnavailable:
                    failures += 1
                    if failures == FAILED_CALLS:
                        break
                    continue
                if done:
                    self._mirror.put(key, value, pointer, self.ttl_seconds, written=True)
                    return
                expected, record = current, self._with_unwritten(key, current)
        value = change(_merged(record, _decode(self._mirror.get(key)))).encode()
        self._mirror.put(key, value, pointer, self.ttl_seconds, written=self._backend is None)
        if self._peers is not None:
            await self._peers.tell({key: value} | dict([pointer] if pointer else []))

    async def _in_mind(self, key: str) -> Record | None:
        """What this replica and the others remember of a session."""
        record = _decode(self._mirror.get(key))
        for known in await self._others([key]):
            record = _merged(record, _decode(known.get(key)))
        return record

    async def _others(self, keys: list[str]) -> list[dict[str, bytes]]:
        return await self._peers.values(keys) if self._peers is not None and keys else []

    def _with_unwritten(self, key: str, raw: bytes | None) -> Record | None:
        """The record, with what this process could not write while the backend was away."""
        return _merged(_decode(raw), _decode(self._mirror.unwritten(key)))

    def _joined(self, key: str, current: bytes | None, unwritten: bytes) -> bytes:
        """A record with what was not written; a pointer is what was written last."""
        record = self._with_unwritten(key, current) if is_record_key(key) else None
        return record.encode() if record is not None else unwritten

    def _absent(self, known: bool) -> StateSource:
        """The source when Redis did not answer; without one, this process is all there is."""
        return StateSource.MIRROR if known or self._backend is None else StateSource.NONE


def _merged(record: Record | None, other: Record | None) -> Record | None:
    if record is None or other is None:
        return record or other
    return record.merged(other)


def _decode(raw: bytes | None) -> Record | None:
    """A record that cannot be read is as good as none: the next commit replaces it."""
    try:
        return Record.decode(raw) if raw else None
    except ValueError:
        return None
