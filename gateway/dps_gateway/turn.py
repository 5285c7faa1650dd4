"""The life of one turn: identify its session, measure its growth, commit it, correct its record."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from dps_gateway.engine.usage import Usage
from dps_gateway.pool import Pool, replica_id
from dps_gateway.prompt.prefixes import Difference, cache_key
from dps_gateway.prompt.renderer import Prompt
from dps_gateway.routing.decision import SINGLE_TOKENS, CachedPrompt, CacheUnits, PolicyInput, PromptTokens
from dps_gateway.session.growth import Growth, History, compare
from dps_gateway.session.identity import Scope, SessionId, SessionKey, client_session_id, history_tag
from dps_gateway.session.record import CachedOn, Point, Record, StoredResponse
from dps_gateway.session.store import SessionStore, Snapshot
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import Replica

EVICTION_SLACK_TOKENS: Final = 256
"""The tokens by which an engine's cached tokens may fall short of the expected ones before an eviction is assumed. An
engine with a draft model caches slightly less."""

KIND_CHARS: Final = 8
"""The number of characters of a digest that are used to distinguish system prompts, if a collision has no effect but on
an expectation."""


@dataclass(frozen=True, slots=True)
class Session:
    """The session of a turn, and the relation of the prompt to the session's history."""

    id: SessionId
    scope: Scope
    snapshot: Snapshot
    growth: Growth
    base: Record
    """The session's record, or the initial record if the session has none."""
    client_id: str | None = None
    """The id that the client sent, if any."""
    by_history: bool = False
    """Whether its turns are recognised by their history, and not by an id."""

    @property
    def affinity(self) -> str:
        """The id that selects the preferred replica of a conversation in it. A fork keeps that of its prefix."""
        return self.base.affinity or self.id.text


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """A measured turn, the input of the routing decision. Lengths are in tokens."""

    session: Session
    prompt: Prompt
    point: Point
    """What the session's record will contain about the prompt, apart from the replica that answers.

    Its correction is that of the prompt that this one grew from. Images, or a chat template on the engine that differs
    from the gateway's, make the counts differ by a constant. Applying it to both lengths cancels it in ΔL_t.
    """
    cached: CachedPrompt
    """The cached prefixes of the prompt, according to the session's record."""
    delta_tokens: int
    """ΔL_t."""

    @property
    def number(self) -> int:
        """The turn's number in its session."""
        return self.point.turn

    @property
    def prompt_tokens(self) -> int:
        """L_t, as the engine is expected to report it."""
        return self.cached.length

    def tokens_on(self, replica: Replica) -> PromptTokens:
        """What a replica has to do for the tokens of the prompt, according to the session's record."""
        return self.cached.tokens(replica.id, replica.units)

    @property
    def affinity(self) -> str:
        """The key that selects the preferred replica among those that hold equally much of the prompt.

        A prompt that grew from none has a key of its own, because clients use one id, such as `prompt_cache_key`, for
        many conversations.
        """
        session = self.session
        return (
            session.affinity
            if session.growth.parent is not None
            else f"{session.affinity} {self.prompt.digest}"
        )

    @property
    def difference(self) -> Difference | None:
        """Where the prompt first differs from the newest one of the session whose history it has changed."""
        session = self.session
        if session.growth.history is not History.CHANGED:
            return None
        return self.prompt.outline.difference(session.base.outline)


class Turns:
    """Measures turns against the session store, and commits them."""

    def __init__(
        self,
        store: SessionStore,
        keys: tuple[SessionKey, ...],
        cache_fields: tuple[str, ...],
        common_prefix_cache: bool = False,
    ) -> None:
        self.store = store
        self.keys = keys
        self._cache_fields = cache_fields
        self.common_prefix_cache = common_prefix_cache

    async def measure(
        self,
        scope: Scope,
        prompt: Prompt,
        headers: Mapping[str, str],
        body: Mapping[str, Any],
        stored: StoredResponse | None = None,
    ) -> MeasuredTurn:
        """Identify the session, by the client's id or else by its history, and measure the prompt's growth.

        A prompt that continues a stored response belongs to that response's session.
        """
        prompt = prompt.in_cache(cache_key(body, self._cache_fields))
        client_id = client_session_id(self.keys, headers, body)
        if stored is not None:
            session = await self._continued(scope, prompt, stored, client_id)
        elif client_id is not None:
            session = await self._named(scope, prompt, client_id)
        else:
            tag = history_tag(prompt.digest_of(prompt.root).encode())
            session = await self._by_history(scope, prompt, tag)
        growth = session.growth
        # A prompt that continues a stored response does not contain what it grew from.
        counted, boundary_tokens = await prompt.measure(growth.parent if stored is None else None)
        point = Point(
            turn=_number(session, prompt, counted),
            digest=prompt.digest,
            offset=prompt.offset,
            tokens=boundary_tokens if stored is None else 0,
            counted=counted,
            holders=(),
            correction=growth.parent.correction if growth.parent is not None else 0,
            shared=self.common_prefix_cache,
        )
        cached = growth.cached(point.length, common_prefix_cache=self.common_prefix_cache)
        return MeasuredTurn(session, prompt, point, cached, growth.delta_tokens(point.length))

    async def commit(self, turn: MeasuredTurn, pool: Pool, url: str, span: str) -> None:
        """Record that the replica of `pool` with this base URL has begun to answer: it now holds the prompt."""
        session, prompt = turn.session, turn.prompt
        await self.store.commit(
            session.scope,
            session.snapshot,
            session.id,
            session.base,
            turn.point._replace(holders=(CachedOn(pool, replica_id(url)),)),
            session.growth.parent,
            span=span,
            outline=prompt.outline.fingerprints,
            pointer_digest=prompt.pointer_digest if session.by_history else None,
        )

    async def correct(
        self,
        turn: MeasuredTurn,
        url: str,
        usage: Usage,
        units: CacheUnits = SINGLE_TOKENS,
        *,
        continued: bool = False,
    ) -> bool:
        """Correct the record with the engine's usage. Returns whether L_t differs from the length that it reports.

        url: the base URL of the replica that answered, whose cache has these units.
        continued: whether several engines have generated the answer, so that the verifications are not those of one.
        """
        replica, growth, digest = replica_id(url), turn.session.growth, turn.prompt.digest
        known, shared = growth.held.get(replica), growth.shared
        evicted = lost = False
        if (cached := usage.cached_tokens) is not None:
            held = cached - (usage.fetched_tokens or 0)
            evicted = known is not None and held + EVICTION_SLACK_TOKENS < units.whole_pages(known.length)
            least = cached + EVICTION_SLACK_TOKENS + units.fetch_threshold_tokens
            lost = (
                usage.fetched_tokens is not None
                and shared is not None
                and least < units.whole_pages(shared.length)
            )
        mismatch = usage.prompt_tokens != turn.prompt_tokens
        verifications = 0 if continued else usage.verifications or 0
        drafted = (usage.completion_tokens, verifications, turn.number)
        if (
            evicted
            or lost
            or mismatch
            or (verifications and turn.session.base.acceptance.changed_by(*drafted))
        ):
            evicted_from = replica if evicted else None

            def corrected(record: Record) -> Record:
                if verifications:
                    record = record._replace(acceptance=record.acceptance.observed(*drafted))
                return record.corrected(digest, usage.prompt_tokens, evicted_from=evicted_from, lost=lost)

            await self.store.amend(turn.session.scope, turn.session.id, corrected)
        return mismatch

    async def _named(self, scope: Scope, prompt: Prompt, client_id: str) -> Session:
        """The session of a client's id.

        A conversation for which its record has no room is a session of its own, which is recognised by its history
        within the session of the id.
        """
        id = SessionId.of_client(scope, client_id)
        snapshot = await self.store.read(scope, id)
        named = _session(id, scope, snapshot, snapshot.record or Record(()), prompt, client_id=client_id)
        if named.base.full and named.growth.history is not History.GROWN:
            return replace(await self._by_history(scope, prompt, id.tag, named), client_id=client_id)
        return named

    async def _continued(
        self, scope: Scope, prompt: Prompt, stored: StoredResponse, client_id: str | None
    ) -> Session:
        """The session of a stored response. The prompt extends this response's turn, unless a recorded point matches
        it."""
        id = SessionId(stored.session)
        snapshot = await self.store.read(scope, id)
        record = snapshot.record or Record(())
        session = _session(id, scope, snapshot, record, prompt, client_id=client_id)
        if session.growth.parent is not None:
            return session
        # The stored length is the engine's, so a point's correction must not be added to it.
        points = tuple(point._replace(counted=point.length, correction=0) for point in record.points)
        growth = compare(record._replace(points=points), lambda point: point.digest == stored.digest)
        return replace(session, growth=growth)

    async def _by_history(
        self, scope: Scope, prompt: Prompt, tag: str, named: Session | None = None
    ) -> Session:
        """The session that committed the longest prefix of this prompt, a fork of it, or a new session.

        A prompt that diverges from a session's history becomes a separate session, because many conversations may
        share a beginning, and one record is too small for all of them. `named` is another session that may have
        committed the longest prefix, and which the prompt does not continue.
        """
        snapshot = await self.store.find(scope, tag, prompt.lookups())
        found = named
        # A boundary is the end of the earlier prompt. An anchor is not, so the earlier prompt may continue differently.
        if snapshot.session and snapshot.point and prompt.starts_with(snapshot.point):
            record = (snapshot.record or Record(())).recalling(snapshot.point)
            other = _session(snapshot.session, scope, snapshot, record, prompt, by_history=True)
            if named is None or _recorded_prefix_bytes(other) >= _recorded_prefix_bytes(named):
                found = other
        if found is None:
            minted = SessionId.of_history(tag, prompt.digest.encode())
            return _session(minted, scope, snapshot, Record(()), prompt, by_history=True)
        return found if found.growth.history is History.GROWN else _fork(found, tag, prompt)


def _session(
    id: SessionId,
    scope: Scope,
    snapshot: Snapshot,
    base: Record,
    prompt: Prompt,
    *,
    client_id: str | None = None,
    by_history: bool = False,
) -> Session:
    return Session(id, scope, snapshot, compare(base, prompt.starts_with), base, client_id, by_history)


def _fork(session: Session, tag: str, prompt: Prompt) -> Session:
    """A new session that starts with the points that the prompt has in common with `session`."""
    growth = session.growth
    points = (growth.parent, growth.shared, *growth.held.values())
    copied = {point.digest: point for point in points if point is not None}
    base = Record(
        tuple(sorted(copied.values(), key=lambda point: -point.turn)),
        affinity=session.affinity,
        acceptance=session.base.acceptance,
    )
    fork = SessionId.of_history(tag, prompt.digest.encode(), parent=session.id)
    return Session(fork, session.scope, session.snapshot, growth, base, by_history=True)


def _recorded_prefix_bytes(session: Session) -> int:
    """The length of the longest recorded prefix of the prompt, in bytes."""
    return session.growth.parent.offset if session.growth.parent is not None else 0


def policy_input_of(turn: MeasuredTurn, pools: Mapping[Pool, EnginePool]) -> PolicyInput:
    """The policy's input for a measured turn, with the present state of the pools."""
    base = turn.session.growth.parent
    affinity = turn.affinity
    views = ((name, pool.view(affinity, turn.cached)) for name, pool in pools.items())
    return PolicyInput(
        prompt_tokens=turn.prompt_tokens,
        delta_tokens=turn.delta_tokens,
        draw=random.random(),
        number=turn.number,
        # None if both pools have served that turn, for example after a retry.
        last_pool=next(iter(base.pools)) if base is not None and len(base.pools) == 1 else None,
        pools={name: view for name, view in views if view is not None},
        acceptance=turn.session.base.acceptance,
        # The tenant, the model and the system prompt with its tools: sessions with these in common may be alike.
        kind=turn.session.scope.name + turn.prompt.digest_of(turn.prompt.system)[:KIND_CHARS],
    )


def _number(session: Session, prompt: Prompt, counted: int) -> int:
    """The turn's number: one more than the session's last, or the same number for a retry of the same prompt.

    If the client supplies the session id, repeating an older prompt counts as a new turn, because the session continues
    from that prompt.
    """
    base = session.growth.parent
    if base is None:
        return session.base.turn + 1
    repeated = base.digest == prompt.digest and base.counted == counted
    if repeated and (session.growth.history is History.GROWN or session.client_id is None):
        return base.turn
    return session.base.turn + 1
