"""Read and commit session records. Redis is authoritative; in-memory copies bridge outages.

A request never fails because of session state. In the worst case the session is treated as new, and ΔL = L.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.keys import Pointer, is_record_key, pointer_key, record_key, record_prefix
from dps_gateway.session.mirror import Mirror
from dps_gateway.session.record import Point, Record
from dps_gateway.session.storage import Backend, ForeignValue, Hit, Peers, StoreUnavailable
from dps_gateway.session.stored_responses import StoredResponse, response_key

log = logging.getLogger(__name__)

MAX_COMMIT_FAILURES: Final = 2
"""The number of Redis failures after which a commit is left to the next flush. One retry is made, because a single
timeout is often transient, and the turn is not available to other gateway replicas until it is committed."""

COMMIT_ATTEMPTS: Final = 8
"""Maximum number of compare-and-set attempts per commit. Each conflict means that another turn of the session was
committed."""

FLUSH_SECONDS: Final = 0.1
"""The interval is short because a turn is not available to other gateway replicas until it is written. A flush with
nothing to write is cheap."""

MAX_FLUSHED: Final = 1000
"""Maximum number of entries per flush. During an outage every flush fails, and should cost little."""


class StateSource(StrEnum):
    """Where a turn's session state came from (response header `x-dps-state`)."""

    REDIS = "redis"
    MIRROR = "mirror"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The session state on which a turn's routing decision is based, and with which its commit is compared."""

    source: StateSource
    session: SessionId | None = None
    record: Record | None = None
    raw: bytes | None = None
    point: Point | None = None
    """The point at which a lookup by history found the session."""


class SessionStore:
    """Reads and commits session records. Only `delete` raises StoreUnavailable."""

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
        """The state of a session with a known id."""
        key = record_key(scope, session)
        if self._backend is not None:
            try:
                raw = await self._backend.get(key)
                return Snapshot(StateSource.REDIS, session, self._with_unwritten(key, raw), raw)
            except StoreUnavailable:
                pass
        record = await self._cached(key)
        return Snapshot(self._fallback_source(record is not None), session, record)

    async def find(self, scope: Scope, tag: str, digests: list[str]) -> Snapshot:
        """The session to which the first existing pointer refers, among the pointers for these prompt prefixes.

        `digests` are ordered from the longest prefix to the shortest.
        """
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
        peers = await self._peer_values(keys) if source is None else []
        for rank, key in enumerate(keys[: hit.rank if hit else None]):
            value = self._mirror.get(key) if source is None else self._mirror.unwritten(key)
            value = value or next((cached[key] for cached in peers if key in cached), None)
            if value is not None:
                hit = Hit(rank, value, None)
                break
        pointer = Pointer.decode(hit.pointer) if hit else None
        if hit is None or pointer is None:
            return Snapshot(source or self._fallback_source(found=False))
        key = record_key(scope, pointer.session)
        raw = hit.record if source else None
        record = self._with_unwritten(key, raw) if source else await self._cached(key)
        return Snapshot(
            source or self._fallback_source(found=True), pointer.session, record, raw, pointer.point
        )

    async def commit(
        self,
        scope: Scope,
        snapshot: Snapshot,
        session: SessionId,
        base: Record,
        point: Point,
        parent: Point | None,
        *,
        span: str = "",
        pointer_digest: str | None = None,
    ) -> None:
        """Add `point`, which grew from `parent`, to the session's record, once an engine has begun to answer it.

        `base` is the initial record if none is stored: a new session, a fork, or a session that Redis lost. If
        `pointer_digest` is set, a pointer to this point is stored as well, by which `find` finds the session, and those
        to the points that this commit drops from the record expire early.
        """
        await self._update(
            record_key(scope, session),
            snapshot if snapshot.session == session else None,
            lambda record: (record or base).with_turn(point, parent, span),
            (pointer_key(scope, session.tag, pointer_digest), Pointer(session, point).encode())
            if pointer_digest
            else None,
            lambda digest: pointer_key(scope, session.tag, digest),
        )

    async def amend(self, scope: Scope, session: SessionId, change: Callable[[Record], Record]) -> None:
        """Apply `change` to the record of an existing session; a no-op if there is none."""
        snapshot = await self.read(scope, session)
        if snapshot.record is not None:
            await self._update(
                record_key(scope, session), snapshot, lambda record: change(record or Record(())), None
            )

    async def remember(
        self, scope: Scope, response_id: str, stored: StoredResponse, *, complete: bool = True
    ) -> None:
        """Record where a response is stored. A newer record of an id replaces the earlier one.

        complete: whether this is the last record of the response. Peers write only such a record to Redis for this
        process, because they could replace it with an earlier one.
        """
        key, value = response_key(scope, response_id), stored.encode()
        written, current = self._backend is None, None
        if self._backend is not None:
            with suppress(StoreUnavailable):
                for _ in range(COMMIT_ATTEMPTS):
                    written, current = await self._backend.swap(key, current, value, self.ttl_seconds, None)
                    if written:
                        break
        self._mirror.put(key, value, None, self.ttl_seconds, written=written)
        if complete and not written and self._peers is not None:
            await self._peers.publish({key: value})

    async def recall(self, scope: Scope, response_id: str) -> StoredResponse | None:
        """Where a response of this tenant is stored, or None if it is unknown."""
        key = response_key(scope, response_id)
        value = self._mirror.get(key)
        if value is None and self._backend is not None:
            with suppress(StoreUnavailable):
                value = await self._backend.get(key)
        for values in await self._peer_values([key]) if value is None else ():
            value = value or values.get(key)
        return StoredResponse.decode(value) if value else None

    async def flush(self) -> int:
        """Write at most MAX_FLUSHED overdue commits to Redis, until the first failure. Returns how many were written.

        An entry whose key holds a foreign value can never be written, and would block those behind it. It is dropped.
        """
        if self._backend is None:
            return 0
        flushed = 0
        for key in self._mirror.unwritten_keys(MAX_FLUSHED):
            try:
                flushed += await self._write(self._backend, key)
            except ForeignValue as error:
                log.error("the session entry %s is dropped: %s; delete this key from Redis", key, error)
                self._mirror.delete(key)
            except StoreUnavailable:
                break
        return flushed

    async def _write(self, backend: Backend, key: str) -> bool:
        """Write an overdue commit. Returns whether it has been written."""
        current = await backend.get(key)
        unwritten = self._mirror.unwritten(key)
        if unwritten is None:  # written by a newer turn in the meantime
            return False
        value = self._with_current(key, current, unwritten)
        done, _ = await backend.swap(key, current, value, self.ttl_seconds, None)
        # A turn committed in the meantime has left a newer value; the next flush writes that one.
        if not done or self._mirror.unwritten(key) != unwritten:
            return False
        self._mirror.mark_written(key, value, self.ttl_seconds)
        return True

    def accept(self, entries: Mapping[str, bytes]) -> None:
        """Cache entries that a peer could not write to Redis, and schedule them for the next flush.

        Redis may be unreachable from just one gateway replica; its peers then write that replica's commits.
        """
        for key, value in entries.items():
            if is_record_key(key):
                record = _merged(_decode(self._mirror.get(key)), _decode(value))
                value = record.encode() if record is not None else value
            self._mirror.put(key, value, None, self.ttl_seconds, written=self._backend is None)

    async def delete(self, scope: Scope, session: SessionId) -> bool:
        """Delete a session's record and the pointers to it, from Redis and from the mirrors of all gateways.

        The pointers of raw text cannot be derived from the record, and expire. Returns whether the session existed.
        Raises StoreUnavailable.
        """
        key = record_key(scope, session)
        stored = _decode(await self._backend.get(key)) if self._backend is not None else None
        record = _merged(stored, await self._cached(key))
        keys = [key, *await self._pointers(scope, session, record)]
        self.forget(keys)
        if self._peers is not None:
            await self._peers.forget(keys)
        # The mirrors come first, because they may contain commits that are still to be written to Redis.
        deleted = await self._backend.delete(keys) if self._backend is not None else False
        return deleted or record is not None

    def forget(self, keys: Iterable[str]) -> None:
        """Remove entries that have been deleted from this process's mirror."""
        for key in keys:
            self._mirror.delete(key)

    async def _pointers(self, scope: Scope, session: SessionId, record: Record | None) -> list[str]:
        """The keys of the pointers to a session for the points in its record. Raises StoreUnavailable.

        A fork has points in common with the session that it was forked from, whose pointers are not its own.
        """
        points = record.points if record is not None else ()
        keys = [pointer_key(scope, session.tag, point.digest) for point in points]
        found = [self._mirror.values(keys), *await self._peer_values(keys)]
        if self._backend is not None:
            values = await asyncio.gather(*map(self._backend.get, keys))
            found.append({key: value for key, value in zip(keys, values, strict=True) if value is not None})
        return [key for key in keys if any(_refers_to(session, values.get(key)) for values in found)]

    async def _update(
        self,
        key: str,
        snapshot: Snapshot | None,
        change: Callable[[Record | None], Record],
        pointer: tuple[str, bytes] | None,
        key_of_pointer: Callable[[str], str] = lambda digest: digest,
    ) -> None:
        record = snapshot.record if snapshot else None
        if self._backend is not None:
            expected = snapshot.raw if snapshot and snapshot.source is StateSource.REDIS else None
            failures = 0
            for _ in range(COMMIT_ATTEMPTS):
                changed = change(record)
                value = changed.encode()
                dropped = [key_of_pointer(digest) for digest in _dropped(record, changed)] if pointer else []
                try:
                    done, current = await self._backend.swap(
                        key, expected, value, self.ttl_seconds, pointer, dropped
                    )
                except StoreUnavailable:
                    failures += 1
                    if failures == MAX_COMMIT_FAILURES:
                        break
                    continue
                if done:
                    # A later turn may not have been written yet, because its writes failed while this one was slow.
                    unwritten = self._mirror.unwritten(key)
                    kept = self._with_current(key, value, unwritten) if unwritten is not None else value
                    self._mirror.put(key, value, pointer, self.ttl_seconds, written=True)
                    if kept != value:
                        self._mirror.put(key, kept, None, self.ttl_seconds, written=False)
                    return
                expected, record = current, self._with_unwritten(key, current)
        value = change(_merged(record, _decode(self._mirror.get(key)))).encode()
        self._mirror.put(key, value, pointer, self.ttl_seconds, written=self._backend is None)
        if self._peers is not None:
            await self._peers.publish({key: value} | dict([pointer] if pointer else []))

    async def _cached(self, key: str) -> Record | None:
        """The record as cached by this gateway replica and its peers."""
        record = _decode(self._mirror.get(key))
        for values in await self._peer_values([key]):
            record = _merged(record, _decode(values.get(key)))
        return record

    async def _peer_values(self, keys: list[str]) -> list[dict[str, bytes]]:
        return await self._peers.values(keys) if self._peers is not None and keys else []

    def _with_unwritten(self, key: str, raw: bytes | None) -> Record | None:
        """The stored record merged with commits that this process has not written yet."""
        return _merged(_decode(raw), _decode(self._mirror.unwritten(key)))

    def _with_current(self, key: str, current: bytes | None, unwritten: bytes) -> bytes:
        """The value to write: a record is merged with the current one; a pointer replaces the current one."""
        record = self._with_unwritten(key, current) if is_record_key(key) else None
        return record.encode() if record is not None else unwritten

    def _fallback_source(self, found: bool) -> StateSource:
        """The source of state that did not come from Redis. If no Redis is configured, it is always the mirror."""
        return StateSource.MIRROR if found or self._backend is None else StateSource.NONE


async def write_behind(store: SessionStore) -> None:
    """Write overdue commits to Redis periodically until cancelled."""
    while True:
        await asyncio.sleep(FLUSH_SECONDS)
        if flushed := await store.flush():
            log.info("wrote %d overdue session entries to Redis", flushed)


def merged_values(found: Iterable[Mapping[str, bytes]]) -> dict[str, bytes]:
    """The cached values of several mirrors as one. Records are merged; of pointers, the first is used."""
    result: dict[str, bytes] = {}
    for values in found:
        for key, value in values.items():
            known = _decode(result.get(key)) if is_record_key(key) else None
            record = _merged(known, _decode(value)) if known is not None else None
            result[key] = record.encode() if record is not None else result.get(key, value)
    return result


def _refers_to(session: SessionId, value: bytes | None) -> bool:
    pointer = Pointer.decode(value) if value is not None else None
    return pointer is not None and pointer.session == session


def _dropped(before: Record | None, after: Record) -> Iterable[str]:
    """The digests of the points that a change has removed from a record."""
    kept = {point.digest for point in after.points}
    return (point.digest for point in before.points if point.digest not in kept) if before is not None else ()


def _merged(record: Record | None, other: Record | None) -> Record | None:
    if record is None or other is None:
        return record or other
    return record.merged(other)


def _decode(raw: bytes | None) -> Record | None:
    """Parse a record. An unreadable one counts as missing: the next commit replaces it."""
    try:
        return Record.decode(raw) if raw else None
    except ValueError:
        return None
