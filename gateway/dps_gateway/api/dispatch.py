"""Finding a replica that answers: first in the pool that the policy chose, then in the other one."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDict

from dps_gateway.api.call import Call
from dps_gateway.api.errors import DeadlineExceeded, Suspended, TenantsNotSeparated
from dps_gateway.cached_prompt import CachedPrompt
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.upstream.admission import Choice, PoolEmpty, PoolFull, ReplicaRequest
from dps_gateway.upstream.deadline import Deadline
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.exchange import Answer, OutOfFiles, UpstreamBroken, UpstreamFailed
from dps_gateway.upstream.replica import Replica
from dps_gateway.upstream.retries import Retries
from dps_gateway.upstream.unanswered import ReplicaLost

ATTEMPTS_PER_POOL: Final = 3

DISPATCH_ERRORS: Final = (
    DeadlineExceeded,
    OutOfFiles,
    PoolEmpty,
    PoolFull,
    Suspended,
    TenantsNotSeparated,
    UpstreamFailed,
)
"""The exceptions of `Dispatch`."""


@dataclass(frozen=True, slots=True)
class Outbound:
    """A request as it is sent to a replica."""

    method: str
    path: str
    body: bytes | None
    headers: Callable[[str | None], CIMultiDict[str]]
    """A function from the API key of the pool's engines (None if they have none) to the request headers."""
    session: str | None
    """The session whose preferred replica is selected. If None, the least loaded replica is selected."""
    tenant: str
    """The tenant. The queue is fair between tenants."""
    urgency: int
    """The urgency in the queue, from 0 (served first) to 7."""
    streamed: bool
    """Whether the engine is expected to stream the answer, so that timeouts.firstByteSeconds applies."""
    buffered: bool
    """Whether a non-streaming answer is read completely before any of it is relayed, so that the request can still be
    retried if reading fails."""
    prompt: CachedPrompt | None
    """The prompt, which determines the preferred replica together with the session; None if it is unknown."""
    salt_header: str | None = None
    """The header with the tenant's cache salt, if only replicas that read it may serve the request."""
    generates: bool = True
    """Whether it occupies the engine's scheduler, whose limit of running requests then applies."""
    replica: str | None = None
    """The base URL of the only replica that can serve the request, in the pool of the decision. None if all can."""


@dataclass(slots=True)
class Placed:
    """A request that a replica has begun to answer. The caller must `close` it."""

    pool: EnginePool
    replica: Replica
    reason: Reason
    answer: Answer
    content: bytes
    """The complete body of an answer that was buffered; empty if it was not."""
    retried: bool
    """Whether earlier attempts failed."""
    sent_tokens: int
    """`sent_tokens` of the replica immediately after this request had been sent."""
    _closed: bool = False

    def close(self) -> None:
        """Release the upstream connection and the replica's slot. Has no effect the second time."""
        if not self._closed:
            self._closed = True
            self.answer.close()
            self.pool.release(self.replica)


def least_loaded(pools: Mapping[Pool, EnginePool]) -> Pool:
    """The pool with the fewest requests in flight per ready replica."""

    def load(pool: Pool) -> float:
        ready = len(pools[pool].ready)
        return pools[pool].in_flight / ready if ready else float("inf")

    return min(Pool.GREEDY, Pool.SPECULATIVE, key=load)


async def dispatch(call: Call, decision: Decision, outbound: Outbound) -> Placed:
    """Send the request to one replica after another until one begins to answer. Raises as `Dispatch.first` does."""
    return await Dispatch(call, decision, outbound).first()


class Dispatch:
    """The attempts to have one request answered. One deadline bounds all of them together."""

    def __init__(self, call: Call, decision: Decision, outbound: Outbound) -> None:
        self._call = call
        self._runtime = call.runtime
        self._decision = decision
        self._outbound = outbound
        total_seconds = self._runtime.upstream.timeouts.total_seconds
        self._deadline = Deadline.of(total_seconds, call.timeout_seconds, time.perf_counter() - call.started)
        self._retries = Retries(call.runtime.retry_budget, streamed=outbound.streamed)
        self._attempts: Counter[Pool] = Counter()
        self._failure: Exception | None = None
        """The last failed attempt."""

    async def first(self) -> Placed:
        """Send the request to one replica after another until one begins to answer.

        Nothing has reached the client yet, so a failure can be retried (see `Retries`), on another replica or in the
        other pool. Raises DeadlineExceeded if the client's time is over, Suspended if the engines are stopped, else the
        last failure: PoolFull, PoolEmpty, TenantsNotSeparated, OutOfFiles or UpstreamFailed.
        """
        if self._runtime.config.routing.suspended:
            raise _suspended()
        decided = self._decision.pool
        if not self._runtime.pools[decided].ready:
            self._runtime.metrics.pool_unavailable.labels(decided.value).inc()
        return await self._next()

    async def again(self, placed: Placed, error: UpstreamBroken) -> Placed:
        """Send the request to another replica after one has begun to stream its answer, and failed.

        Closes `placed`. Raises as `first` does; UpstreamFailed also if the request must not be sent again.
        """
        failure = error.as_failure()
        late = self._deadline.passed
        if not late:
            # Before its slot is released, so that the slot is not assigned to a queued request.
            self._record(placed.pool, placed.replica, failure)
        placed.close()
        if late or not self._retries.allowed_after_start(failure):
            raise failure
        return await self._next()

    def record_end(self, placed: Placed, error: UpstreamBroken) -> None:
        """Record that a replica has begun to stream an answer that is not sent again, and failed.

        Only a timeout counts: a connection may be closed because of the request.
        """
        if error.kind == "timeout" and not self._deadline.passed:
            placed.pool.record_error(placed.replica)

    async def _next(self) -> Placed:
        """The next answer. Raises as `first` does."""
        if self._deadline.passed_for_client:
            raise self._call.deadline_exceeded()
        try:
            return await self._try_replicas()
        except (PoolEmpty, PoolFull, UpstreamFailed) as error:
            if self._deadline.passed_for_client:
                raise self._call.deadline_exceeded() from error
            raise

    async def _try_replicas(self) -> Placed:
        """Try one replica after another. Raises Suspended, PoolEmpty, PoolFull or UpstreamFailed."""
        while choices := self._choices():
            slot = await self._slot(choices)
            if slot is None:
                continue
            placed = await self._attempt(*slot)
            if placed is not None:
                return placed
        raise self._failure or PoolFull("no replica accepted the request")

    def _choices(self) -> list[Choice]:
        """The pools that may serve the next attempt: the one of the decision, and the other if the first is full.

        Overload does not change a FIXED decision about a turn: a baseline policy's pool must not change in an
        experiment. The other pool is then used only if no replica of the first is left, and if neither has one, the
        request waits for the first one of either pool.
        """
        pools, decision, only = self._runtime.pools, self._decision, self._outbound.replica
        choices = [
            Choice(pools[pool], self._retries.avoid(pool) | self._unsalted(pools[pool]))
            for pool in (decision.pool, decision.pool.other)
            if self._attempts[pool] < ATTEMPTS_PER_POOL and self._retries.may_stay(pool)
        ]
        if only is not None:
            pool = pools[decision.pool]
            others = pool.replicas.keys() - {only}
            return [Choice(pool, each.avoid | others) for each in choices if each.pool is pool]
        if decision.reason is not Reason.FIXED or decision.stateless:
            return choices
        return _usable(choices)[:1] or choices

    def _unsalted(self, pool: EnginePool) -> frozenset[str]:
        """The base URLs of the replicas that would not separate the tenants of this request."""
        header = self._outbound.salt_header
        if header is None:
            return frozenset()
        return frozenset(
            url for url, replica in pool.replicas.items() if not replica.reads_salt_header(header)
        )

    async def _slot(self, choices: list[Choice]) -> tuple[EnginePool, Replica] | None:
        """Wait for a slot for the next attempt. None if no replica of `choices` is left, but there are new choices.

        Raises Suspended, PoolEmpty or PoolFull.
        """
        runtime, outbound = self._runtime, self._outbound
        queued_at = time.perf_counter()
        patience = min(runtime.upstream.timeouts.queue_seconds, self._deadline.left_seconds)
        wake_seconds = self._wake_seconds()
        if wake_seconds:
            # A replica on which the request has failed is not ready again before a health check has succeeded.
            choices = [Choice(choice.pool) for choice in choices]
        held = outbound.prompt.held if outbound.prompt is not None else {}
        request = ReplicaRequest(
            choices, outbound.session, outbound.tenant, outbound.urgency, held, outbound.generates
        )
        try:
            chosen, replica = await runtime.admission.acquire(
                request, patience, wake_seconds, self._deadline.left_seconds
            )
        except PoolEmpty as error:
            if runtime.config.routing.suspended:
                raise _suspended() from error
            if wake_seconds:
                raise
            unsalted = any(
                self._unsalted(pool).intersection(pool.replicas) for pool in runtime.pools.values()
            )
            self._failure = self._failure or (_not_separated() if unsalted else error)
            if _usable(self._choices()) or self._wake_seconds():
                return None
            raise self._failure from None
        pool = runtime.pools[Pool(chosen.name)]
        if not self._call.dispatched:
            self._call.dispatched = True
            runtime.metrics.overhead.observe(queued_at - self._call.started)
            runtime.metrics.queue_time.labels(pool.name.value).observe(time.perf_counter() - queued_at)
        return pool, replica

    def _wake_seconds(self) -> float:
        """How long to wait for the first replica: 0 if one is ready, or if only a certain one can serve the request."""
        if self._outbound.replica is not None or any(pool.ready for pool in self._runtime.pools.values()):
            return 0.0
        return min(self._runtime.upstream.timeouts.wake_seconds or 0.0, self._deadline.left_seconds)

    async def _attempt(self, pool: EnginePool, replica: Replica) -> Placed | None:
        """Send the request to a replica whose slot is taken. None if this fails and another attempt is allowed.

        Raises UpstreamFailed if no other attempt is allowed. The slot is released unless the replica answers.
        """
        if replica.url in self._unsalted(pool):  # it was not ready when the request was queued
            pool.release(replica)
            self._failure = _not_separated()
            return None
        reason = self._reason(pool)
        self._attempts[pool.name] += 1
        self._call.headers |= {"x-dps-pool": pool.name.value, "x-dps-reason": reason.value}
        prefill_tokens = _prefill_tokens(self._outbound, replica)
        sent_tokens = replica.sent_tokens + prefill_tokens
        try:
            answer, content = await self._send(pool, replica, prefill_tokens)
        except UpstreamFailed as error:
            self._runtime.metrics.upstream_failures.labels(pool.name.value, error.kind).inc()
            self._record(pool, replica, error)
            pool.release(replica)
            if self._deadline.passed or not self._retries.allowed_after(error):
                raise
            return None
        except BaseException:
            pool.release(replica)
            raise
        if answer.status >= 500:
            pool.record_error(replica)
        else:
            pool.record_success(replica)
        retried = self._failure is not None
        return Placed(pool, replica, reason, answer, content, retried, sent_tokens)

    def _reason(self, pool: EnginePool) -> Reason:
        """The decision's reason, or why the attempt is not made in the decision's pool."""
        decided = self._decision.pool
        if pool.name is decided:
            return self._decision.reason
        tried = self._attempts[decided] > 0
        return Reason.FAILOVER if tried or not self._runtime.pools[decided].ready else Reason.OVERLOAD

    def _record(self, pool: EnginePool, replica: Replica, error: UpstreamFailed) -> None:
        """Record a failed attempt for later attempts, and in the replica's state."""
        self._failure = error
        down = self._retries.record(pool.name, replica.url, error)
        if self._deadline.passed_for_client:
            # The failure may be due to the client's short deadline, and not to the replica.
            return
        if down:
            pool.mark_unavailable(replica)
        elif error.kind == "timeout" or (error.rejected and error.kind != "status_429"):
            pool.record_error(replica)

    async def _send(self, pool: EnginePool, replica: Replica, prefill_tokens: int) -> tuple[Answer, bytes]:
        """The replica's answer, and its body if it is buffered. Raises UpstreamFailed."""
        outbound = self._outbound
        replica.prefill_tokens += prefill_tokens
        try:
            async with pool.unanswered.waiting(replica):
                answer = await self._runtime.upstream.send(
                    replica.url,
                    outbound.path,
                    outbound.body,
                    outbound.headers(pool.api_key),
                    outbound.method,
                    deadline=self._deadline,
                    streamed=outbound.streamed,
                    fresh_connection=self._retries.fresh_connection,
                    trust=pool.trust,
                )
            replica.begun_tokens += prefill_tokens
        except ReplicaLost as error:
            raise UpstreamFailed("lost", str(error)) from error
        finally:
            replica.prefill_tokens -= prefill_tokens
        if answer.streams or not outbound.buffered:
            return answer, b""
        try:
            return answer, await answer.body()
        except UpstreamBroken as error:
            answer.close()
            raise error.as_failure() from error
        except BaseException:
            answer.close()
            raise


def _usable(choices: list[Choice]) -> list[Choice]:
    """The choices with a replica that may receive requests."""
    return [choice for choice in choices if choice.pool.usable(choice.avoid)]


def _suspended() -> Suspended:
    return Suspended("the engines are stopped, because this router is suspended")


def _not_separated() -> TenantsNotSeparated:
    return TenantsNotSeparated(
        "no ready engine separates the cached prefixes of tenants on this endpoint: SGLang needs the plugin dps_sglang "
        "for it (docs/prefix-cache.md); or set auth.isolateCache to false, so that tenants share cached prefixes"
    )


def _prefill_tokens(outbound: Outbound, replica: Replica) -> int:
    """The tokens that the replica has to prefill, if the end of the prefill can be observed; otherwise 0.

    The first byte of an answer that is not streamed is sent when the answer is complete.
    """
    if outbound.prompt is None or not outbound.streamed:
        return 0
    return outbound.prompt.tokens(replica.id, replica.units).prefill
