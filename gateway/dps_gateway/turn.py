"""One turn on its way: recognised, compared with its session's history, measured, decided, committed."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dps_gateway.pool import Pool
from dps_gateway.prompt.accounting import Prompt
from dps_gateway.routing.decision import Decision, Policy, Turn
from dps_gateway.session.identity import Scope, SessionId, SessionKey, client_session_id, history_tag
from dps_gateway.session.record import Growth, History, Point, Record, compare
from dps_gateway.session.store import SessionStore, Snapshot

EVICTION_SLACK_TOKENS: Final = 256
"""How much less than expected an engine may find cached before the record is corrected: pages, and draft models
that keep a little less."""


@dataclass(frozen=True, slots=True)
class Session:
    """Whose turn it is, and how its prompt relates to what was there before."""

    id: SessionId
    scope: Scope
    snapshot: Snapshot
    growth: Growth
    base: Record
    """What the session's record starts from, should there be none."""
    client_id: str | None = None
    """The id the client gave, if it gave one."""


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """A turn that is ready to be decided. Tokens."""

    session: Session
    prompt: Prompt
    prompt_tokens: int
    boundary_tokens: int
    number: int

    @property
    def delta_tokens(self) -> int:
        return self.session.growth.delta_tokens(self.prompt_tokens)

    def point(self, pool: Pool) -> Point:
        """What is remembered once `pool` has begun to answer."""
        prompt = self.prompt
        return Point(
            self.number,
            prompt.digest,
            prompt.offset,
            self.boundary_tokens,
            self.prompt_tokens,
            frozenset({pool}),
        )


class Turns:
    """Session state on one side, prompts on the other: what a turn needs before and after its decision."""

    def __init__(self, store: SessionStore, keys: tuple[SessionKey, ...]) -> None:
        self.store = store
        self._keys = keys

    def configure(self, keys: tuple[SessionKey, ...], ttl_seconds: int) -> None:
        """Apply a new order of session keys and a new TTL, for the turns that follow."""
        self._keys = keys
        self.store.ttl_seconds = ttl_seconds

    async def measure(
        self, scope: Scope, prompt: Prompt, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> MeasuredTurn:
        """Recognise the session, by the client's id or else by its history, and measure its growth."""
        client_id = client_session_id(self._keys, headers, body)
        session = (
            await self._named(scope, prompt, client_id)
            if client_id is not None
            else await self._remembered(scope, prompt)
        )
        base = session.growth.base
        length, boundary_tokens = await prompt.measure(base)
        return MeasuredTurn(session, prompt, length, boundary_tokens, _number(session, prompt, length))

    async def commit(self, turn: MeasuredTurn, pool: Pool, span: str) -> None:
        """Remember that `pool` has begun to answer: from here on its KV cache holds the prompt."""
        session = turn.session
        await self.store.commit(
            session.scope,
            session.snapshot,
            session.id,
            session.base,
            turn.point(pool),
            span=span,
            pointed=session.client_id is None and turn.prompt.ends_at_boundary,
        )

    async def correct(
        self, turn: MeasuredTurn, pool: Pool, prompt_tokens: int, cached_tokens: int | None
    ) -> bool:
        """Take the engine's word over the record's; True if the prompt's length was not what it counted."""
        promised = turn.session.growth.seen.get(pool)
        evicted = (
            cached_tokens is not None
            and promised is not None
            and cached_tokens + EVICTION_SLACK_TOKENS < promised.length
        )
        mismatch = prompt_tokens != turn.prompt_tokens
        if evicted or mismatch:
            digest = turn.prompt.digest

            def corrected(record: Record) -> Record:
                record = record.with_length(digest, prompt_tokens)
                return record.without_cache(pool, keep=digest) if evicted else record

            await self.store.amend(turn.session.scope, turn.session.id, corrected)
        return mismatch

    async def _named(self, scope: Scope, prompt: Prompt, client_id: str) -> Session:
        session = SessionId.of_client(scope, client_id)
        snapshot = await self.store.read(scope, session)
        growth = compare(snapshot.record, prompt.starts_with)
        return Session(session, scope, snapshot, growth, snapshot.record or Record(()), client_id)

    async def _remembered(self, scope: Scope, prompt: Prompt) -> Session:
        """The session that wrote the longest prefix of this prompt; a new one, or a fork, where there is none.

        A prompt that leaves a session's history before its end is a session of its own from there on: many
        conversations begin alike, and one record cannot remember where each of them is.
        """
        root = prompt.prefixes.digest(prompt.boundaries[0]) if prompt.boundaries else prompt.digest
        tag = history_tag((root or "").encode())
        digest = prompt.digest.encode()
        snapshot = await self.store.find(scope, tag, prompt.lookups())
        if snapshot.session is None or snapshot.point is None:
            minted = SessionId.of_history(tag, digest)
            return Session(minted, scope, snapshot, compare(None, prompt.starts_with), Record(()))
        record = (snapshot.record or Record(())).recalling(snapshot.point)
        growth = compare(record, prompt.starts_with)
        if growth.history is History.GROWN:
            return Session(snapshot.session, scope, snapshot, growth, record)
        fork = SessionId.of_history(tag, digest, parent=snapshot.session)
        known = {point.digest: point for point in (growth.base, *growth.seen.values()) if point is not None}
        base = Record(tuple(sorted(known.values(), key=lambda point: -point.turn)))
        return Session(fork, scope, snapshot, growth, base)


def decide(policy: Policy, turn: MeasuredTurn) -> Decision:
    """The policy's decision for a measured turn."""
    return policy.decide(Turn(turn.prompt_tokens, turn.delta_tokens, draw=random.random()))


def _number(session: Session, prompt: Prompt, length: int) -> int:
    """The turn's number: one more than the session's last, or the same if the very same prompt comes again.

    An older prompt that comes again under the client's own id is a new turn, though: the session goes on there.
    """
    base = session.growth.base
    if base is None:
        return session.base.turn + 1
    again = base.digest == prompt.digest and base.length == length
    if again and (session.growth.history is History.GROWN or session.client_id is None):
        return base.turn
    return session.base.turn + 1
