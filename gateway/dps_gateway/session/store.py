"""Read and commit session records. Redis is authoritative; in-memory copies bridge outages.

A request never fails because of session state. In the worst case the session is treated as new, and ΔL = L.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, Final, NamedTuple

from dps_gateway.session.identity import Scope, SessionId
from dps_gateway.session.record import (
    Point,
    Pointer,
    Record,
    StoredResponse,
    is_record_key,
    pointer_key,
    record_key,
    record_prefix,
    response_key,
)
from dps_gateway.session.redis import ForeignValue, Hit, RedisBackend, StoreUnavailable

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

    def document(self) -> dict[str, Any]:
        """The record as a JSON document. `bytes` is the length of the rendered prompt's prefix that a digest covers."""
        record = self.record or Record(())
        return {
            "session": self.session.text if self.session is not None else None,
            "source": self.source.value,
            "turn": record.turn,
            "points": [
                {
                    "turn": point.turn,
                    "promptTokens": point.length,
                    "digest": point.digest,
                    "bytes": point.offset,
                    "holders": [{"pool": pool, "replica": replica} for pool, replica in point.holders],
                    "shared": point.shared,
                }
                for point in record.points
            ],
        }


class _Entry(NamedTuple):
    value: bytes
    expires: float


class Mirror:
    """A bounded in-process copy of session state: the fallback while Redis is unavailable.

    The entry that was set least recently is removed first, and entries expire after their TTL. It is neither shared
    between processes nor durable. Entries that Redis does not have yet are marked as unwritten.
    """

    def __init__(self, max_entries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._unwritten: dict[str, None] = {}
        """The keys of unwritten entries. The one that was set least recently is first."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> bytes | None:
        """The value, or None if there is none that has not expired."""
        entry = self._entries.get(key)
        return entry.value if entry is not None and entry.expires >= self._clock() else None

    def unwritten(self, key: str) -> bytes | None:
        """The value if it is unwritten, else None."""
        return self.get(key) if key in self._unwritten else None

    def unwritten_keys(self, limit: int) -> list[str]:
        """At most `limit` keys of unwritten entries, those set least recently."""
        keys = list(islice(self._unwritten, limit))
        for key in keys:
            if self.get(key) is None:  # expired
                del self._unwritten[key]
        return [key for key in keys if key in self._unwritten]

    def put(self, key: str, value: bytes, ttl_seconds: int, *, written: bool) -> None:
        """Set a value. written: whether Redis has it, or is not used."""
        self.delete(key)
        self._entries[key] = _Entry(value, self._clock() + ttl_seconds)
        if not written:
            self._unwritten[key] = None
        while len(self._entries) > self._max_entries:
            self.delete(next(iter(self._entries)))

    def delete(self, key: str) -> None:
        """Delete an entry, if it exists."""
        self._unwritten.pop(key, None)
        self._entries.pop(key, None)


class SessionStore:
    """Reads and commits session records. Only `delete` raises StoreUnavailable."""

    def __init__(self, backend: RedisBackend | None, mirror: Mirror, ttl_seconds: int) -> None:
        self._backend = backend
        self._mirror = mirror
        self.ttl_seconds = ttl_seconds

    async def read(self, scope: Scope, session: SessionId) -> Snapshot:
        """The state of a session with a known id."""
        key = record_key(scope, session)
        if self._backend is not None:
            with suppress(StoreUnavailable):
                raw = await self._backend.get(key)
                return Snapshot(StateSource.REDIS, session, self._with_unwritten(key, raw), raw)
        record = _decode(self._mirror.get(key))
        return Snapshot(self._fallback_source(record is not None), session, record)

    async def find(self, scope: Scope, tag: str, digests: list[str]) -> Snapshot:
        """The session to which the first existing pointer refers, among the pointers for these prompt prefixes.

        `digests` are ordered from the longest prefix to the shortest.
        """
        keys = [pointer_key(scope, tag, digest) for digest in digests]
        source: StateSource | None = None
        hit: Hit | None = None
        if self._backend is not None:
            with suppress(StoreUnavailable):
                hit = await self._backend.find(keys, record_prefix(scope, tag))
                source = StateSource.REDIS
        # This process may have pointers to longer prefixes, which could not be written to Redis yet.
        look_up = self._mirror.get if source is None else self._mirror.unwritten
        for rank, key in enumerate(keys[: hit.rank if hit else None]):
            if (value := look_up(key)) is not None:
                hit = Hit(rank, value, None)
                break
        pointer = Pointer.decode(hit.pointer) if hit else None
        if hit is None or pointer is None:
            return Snapshot(source or self._fallback_source(found=False))
        key, raw = record_key(scope, pointer.session), hit.record
        record = _decode(self._mirror.get(key)) if source is None else self._with_unwritten(key, raw)
        found_in = source or self._fallback_source(found=True)
        return Snapshot(found_in, pointer.session, record, raw, pointer.point)

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
        outline: str = "",
        pointer_digest: str | None = None,
    ) -> None:
        """Add `point`, which grew from `parent`, to the session's record, once an engine has begun to answer it.

        `base` is the initial record if none is stored: a new session, a fork, or a session that Redis lost. If
        `pointer_digest` is set, a pointer to this point is stored as well, by which `find` finds the session.
        """
        pointer = None
        if pointer_digest:
            pointer = pointer_key(scope, session.tag, pointer_digest), Pointer(session, point).encode()
        await self._update(
            record_key(scope, session),
            snapshot if snapshot.session == session else Snapshot(snapshot.source),
            lambda record: (record or base).with_turn(point, parent, span, outline),
            pointer,
        )

    async def amend(self, scope: Scope, session: SessionId, change: Callable[[Record], Record]) -> None:
        """Apply `change` to the record of an existing session; a no-op if there is none."""
        snapshot = await self.read(scope, session)
        if snapshot.record is not None:
            key = record_key(scope, session)
            await self._update(key, snapshot, lambda record: change(record or Record(())))

    async def remember(self, scope: Scope, response_id: str, stored: StoredResponse) -> None:
        """Record where a response is stored. A newer record of an id replaces the earlier one."""
        key, value = response_key(scope, response_id), stored.encode()
        written = self._backend is None
        if self._backend is not None:
            with suppress(StoreUnavailable):
                await self._backend.set(key, value, self.ttl_seconds)
                written = True
        self._mirror.put(key, value, self.ttl_seconds, written=written)

    async def recall(self, scope: Scope, response_id: str) -> StoredResponse | None:
        """Where a response of this tenant is stored, or None if it is unknown."""
        key = response_key(scope, response_id)
        value = self._mirror.get(key)
        if value is None and self._backend is not None:
            with suppress(StoreUnavailable):
                value = await self._backend.get(key)
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

    async def _write(self, backend: RedisBackend, key: str) -> bool:
        """Write an unwritten entry. Returns whether the mirror has nothing newer for its key."""
        current = await backend.get(key) if is_record_key(key) else None
        value = unwritten = self._mirror.unwritten(key)
        if value is None:  # a newer value has been written in the meantime
            return False
        done = True
        if is_record_key(key):
            record = self._with_unwritten(key, current)
            value = record.encode() if record is not None else value
            done, _ = await backend.swap(key, current, value, self.ttl_seconds)
        else:
            await backend.set(key, value, self.ttl_seconds)
        # A turn committed in the meantime has left a newer value; the next flush writes that one.
        if not done or self._mirror.unwritten(key) != unwritten:
            return False
        self._mirror.put(key, value, self.ttl_seconds, written=True)
        return True

    async def delete(self, scope: Scope, session: SessionId) -> bool:
        """Delete a session's record and the pointers to it, from Redis and from this replica's mirror.

        Copies in the mirrors of other replicas are used only while Redis is unavailable, until they expire.

        Pointers of raw text, and of points that the record has dropped, cannot be derived from it. They expire. Returns
        whether the session existed. Raises StoreUnavailable.
        """
        key = record_key(scope, session)
        stored = _decode(await self._backend.get(key)) if self._backend is not None else None
        record = _merged(stored, _decode(self._mirror.get(key)))
        keys = [key, *await self._pointers(scope, session, record)]
        # The mirror comes first, because it may contain commits that are still to be written to Redis.
        for each in keys:
            self._mirror.delete(each)
        deleted = await self._backend.delete(keys) if self._backend is not None else False
        return deleted or record is not None

    async def _pointers(self, scope: Scope, session: SessionId, record: Record | None) -> list[str]:
        """The keys of the pointers to a session for the points in its record. Raises StoreUnavailable.

        A fork has points in common with the session that it was forked from, whose pointers are not its own.
        """
        keys = [pointer_key(scope, session.tag, point.digest) for point in record.points] if record else []
        values = [(key, self._mirror.get(key)) for key in keys]
        if self._backend is not None:
            values += zip(keys, await asyncio.gather(*map(self._backend.get, keys)), strict=True)
        pointers = [(key, Pointer.decode(value)) for key, value in values if value is not None]
        return [key for key, pointer in pointers if pointer is not None and pointer.session == session]

    async def _update(
        self,
        key: str,
        snapshot: Snapshot,
        change: Callable[[Record | None], Record],
        pointer: tuple[str, bytes] | None = None,
    ) -> None:
        """Apply `change`, which is idempotent, to a session's record, and store it with `pointer`, a key and a value.

        The first attempt is based on the turn's snapshot, so that a turn usually costs one round trip to read and one
        to write.
        """
        record, expected = snapshot.record, snapshot.raw
        failures = attempts = 0
        while self._backend is not None and attempts < COMMIT_ATTEMPTS and failures < MAX_COMMIT_FAILURES:
            attempts += 1
            value = change(record).encode()
            try:
                done, current = await self._backend.swap(key, expected, value, self.ttl_seconds, pointer)
            except StoreUnavailable:
                # The write may have been applied although its reply was lost. The next attempt then finds the changed
                # record as the current one, to which the change is applied again without effect.
                failures += 1
                continue
            if done:
                self._keep(key, value, pointer, written=True)
                return
            # Another turn has been committed since the snapshot, possibly by another gateway. The change is repeated on
            # its record, and on turns of this process that Redis does not have yet.
            expected, record = current, self._with_unwritten(key, current)
        # Redis is not available (or not used). The mirror's record may be newer than the snapshot; `flush` merges the
        # result with what Redis has by then.
        record = _merged(record, _decode(self._mirror.get(key)))
        self._keep(key, change(record).encode(), pointer, written=self._backend is None)

    def _keep(self, key: str, value: bytes, pointer: tuple[str, bytes] | None, *, written: bool) -> None:
        """Keep a record and a new pointer to it in the mirror.

        If a later turn has failed to write its record while the write of this one was slow, the mirror has that turn
        only. It is merged with this record, and stays unwritten.
        """
        kept = self._with_unwritten(key, value) if written and self._mirror.unwritten(key) else None
        merged = kept.encode() if kept is not None else value
        self._mirror.put(key, merged, self.ttl_seconds, written=written and merged == value)
        if pointer is not None:
            self._mirror.put(*pointer, self.ttl_seconds, written=written)

    def _with_unwritten(self, key: str, raw: bytes | None) -> Record | None:
        """The stored record merged with commits that this process has not written yet."""
        return _merged(_decode(raw), _decode(self._mirror.unwritten(key)))

    def _fallback_source(self, found: bool) -> StateSource:
        """The source of state that did not come from Redis. If no Redis is configured, it is always the mirror."""
        return StateSource.MIRROR if found or self._backend is None else StateSource.NONE


async def write_behind(store: SessionStore) -> None:
    """Write overdue commits to Redis periodically until cancelled."""
    while True:
        await asyncio.sleep(FLUSH_SECONDS)
        if flushed := await store.flush():
            log.info("wrote %d overdue session entries to Redis", flushed)


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
