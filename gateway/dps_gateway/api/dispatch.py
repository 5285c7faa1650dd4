"""Finding a replica that answers: first in the pool that the policy chose, then in the other one."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from http import HTTPStatus
from typing import Final

import orjson

from dps_gateway.api.call import TIMEOUT_HEADER, Call, urgency_of
from dps_gateway.api.errors import Problem, Refused
from dps_gateway.api.outcome import Failure, failure_in
from dps_gateway.api.sse import beginning
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.session.record import StoredResponse
from dps_gateway.upstream.admission import PoolEmpty, PoolFull, Slot, SlotRequest
from dps_gateway.upstream.deadline import Deadline
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.exchange import (
    RETRYABLE_STATUSES,
    Answer,
    Outbound,
    OutOfFiles,
    Rejection,
    UpstreamBroken,
    UpstreamFailed,
    forwarded_headers,
    not_begun,
)
from dps_gateway.upstream.replica import UNKNOWN, Replica
from dps_gateway.upstream.retries import FATAL_SECONDS, Retries

ATTEMPTS_PER_POOL: Final = 3

DISPATCH_ERRORS: Final = (OutOfFiles, PoolEmpty, PoolFull, Refused, UpstreamFailed)
"""The exceptions of `Dispatch`."""


def least_loaded(pools: Mapping[Pool, EnginePool]) -> Pool:
    """The pool with the fewest requests in flight per ready replica."""

    def load(pool: Pool) -> float:
        ready = len(pools[pool].ready)
        return pools[pool].in_flight / ready if ready else float("inf")

    return min(Pool.GREEDY, Pool.SPECULATIVE, key=load)


async def find_stored_response(call: Call, response_id: str) -> StoredResponse:
    """The engine that holds a response of the call's tenant.

    Raises Refused if the response is unknown or the engine has been removed, and PoolEmpty if the engine is not ready.
    """
    runtime = call.runtime
    stored = await runtime.turns.store.recall(runtime.scope(call.tenant), response_id)
    if stored is None:
        raise Refused(Problem.RESPONSE_NOT_FOUND, f"Response with id '{response_id}' not found.")
    replica = runtime.pools[stored.pool].replicas.get(stored.url)
    if replica is None:
        raise Refused(
            Problem.RESPONSE_NOT_FOUND,
            f"The engine that held response '{response_id}' is gone: send the whole conversation in input.",
        )
    if not replica.ready:
        raise PoolEmpty(f"the engine that holds response '{response_id}' is not ready")
    return stored


class Dispatch:
    """The attempts to have one request answered. One deadline bounds all of them together.

    It owns the slot and the answer of the attempt that succeeded until `close` is called or `rest` replaces them.
    """

    pool: EnginePool
    replica: Replica
    reason: Reason
    answer: Answer
    content: bytes
    """The complete body of an answer that was buffered; empty if it was not."""
    retried: bool
    """Whether earlier attempts failed."""
    sent_tokens: int
    """`sent_tokens` of the replica immediately after the request had been sent."""
    load_at_start: int
    """`load` of the replica when it began to answer."""

    def __init__(self, call: Call, decision: Decision, outbound: Outbound) -> None:
        self._call = call
        self._runtime = runtime = call.runtime
        self._decision = decision
        self._outbound = outbound
        total_seconds = runtime.upstream.timeouts.total_seconds
        self._deadline = Deadline.of(total_seconds, call.timeout_seconds, time.perf_counter() - call.started)
        self._sent = outbound.path, outbound.body
        """The whole request, also while an engine is asked for the rest of its answer."""
        fatal = runtime.fatal_requests.replicas(*self._sent)
        self._retries = Retries(runtime.retry_budget, streamed=outbound.streamed, fatal=fatal)
        self._attempts: Counter[Pool] = Counter()
        self._failure: Exception | None = None
        """The last failed attempt."""
        self._resources = ExitStack()
        """Holds the slot and the answer of the attempt that succeeded."""

    def close(self) -> None:
        """Release the connection to the engine and its slot. Has no effect the second time."""
        self._resources.close()

    async def first(self) -> None:
        """Send the request to one replica after another until one begins to answer.

        Nothing of the answer has reached the client yet, so a failure can be retried (see `Retries`), on another
        replica or in the other pool. Raises Refused if the request's time is over, or if the engines are stopped or
        separate no tenants, else the last failure: PoolFull, PoolEmpty, OutOfFiles or UpstreamFailed.
        """
        if self._runtime.config.routing.suspended:
            raise _suspended()
        if self._retries.fatal:
            raise _fatal()
        decided = self._decision.pool
        if not self._runtime.pools[decided].ready:
            self._runtime.metrics.pool_unavailable.labels(decided.value).inc()
        await self._next()

    async def rest(self, error: UpstreamBroken, body: bytes) -> None:
        """Send a request for the rest of an answer that a replica has begun to stream, and failed, to another replica.

        Raises as `first` does; UpstreamFailed also if the request must not be sent again.
        """
        failure = error.as_failure()
        late = self._deadline.passed
        if not late:
            # Before its slot is released, so that the slot is not assigned to a queued request.
            self._record(self.pool, self.replica, failure)
        self.close()
        if late or not self._retries.allowed_after_start(failure):
            raise failure
        self._outbound = replace(self._outbound, body=body)
        await self._next()

    def record_end(self, error: UpstreamBroken) -> None:
        """Record that the replica has begun to stream an answer that no other one continues, and failed.

        Only a timeout or an early end counts as an error: a connection may be closed because of the request.
        """
        if error.kind in ("timeout", "aborted") and not self._deadline.passed:
            self.pool.record_error(self.replica)
        elif error.kind == "broken":
            self._runtime.fatal_requests.add(*self._sent, self.replica.url)
            self.pool.suspect(self.replica, error=False)

    def record_success(self) -> None:
        """Record that the answer is complete, so that earlier failures were not due to the request."""
        self._runtime.fatal_requests.forget(*self._sent)

    async def _next(self) -> None:
        """Have the request answered. Raises as `first` does."""
        if self._deadline.over:
            raise self._deadline_exceeded()
        try:
            while pools := self._pools():
                slot = await self._slot(pools)
                if slot is not None and await self._attempt(slot):
                    return
            raise self._failure or PoolFull("no replica accepted the request")
        except (PoolEmpty, PoolFull, UpstreamFailed) as error:
            if self._deadline.over:
                raise self._deadline_exceeded() from error
            raise

    def _deadline_exceeded(self) -> Refused:
        setting = TIMEOUT_HEADER if self._deadline.of_client else "timeouts.totalSeconds"
        return Refused(
            Problem.DEADLINE_EXCEEDED, f"no engine answered within {self._deadline.seconds:g} s ({setting})"
        )

    def _pools(self) -> list[EnginePool]:
        """The pools that may serve the next attempt: the one of the decision, and the other if the first is full.

        Overload does not change a FIXED decision about a turn: a baseline policy's pool must not change in an
        experiment. The other pool is then used only if no replica of the first is left, and if neither has one, the
        request waits for the first one of either pool.
        """
        decision, only = self._decision, self._outbound.replica
        pools = [
            self._runtime.pools[pool]
            for pool in ((decision.pool,) if only is not None else (decision.pool, decision.pool.other))
            if self._attempts[pool] < ATTEMPTS_PER_POOL and self._retries.may_stay(pool)
        ]
        if only is not None or decision.reason is not Reason.FIXED or decision.stateless:
            return pools
        return self._usable(pools)[:1] or pools

    def _usable(self, pools: list[EnginePool]) -> list[EnginePool]:
        """The pools with a replica that may receive the request."""
        return [pool for pool in pools if pool.usable(self._accepts)]

    def _accepts(self, pool: EnginePool, replica: Replica) -> bool:
        """Whether a replica may receive the request, and has not failed to answer it."""
        return self._suits(pool, replica) and not self._retries.avoids(pool.name, replica.url)

    def _suits(self, pool: EnginePool, replica: Replica) -> bool:
        """Whether a replica may receive the request."""
        only = self._outbound.replica
        return (only is None or replica.url == only) and self._separates_tenants(replica)

    def _separates_tenants(self, replica: Replica) -> bool:
        header = self._outbound.salt_header
        return header is None or (replica.configuration or UNKNOWN).salt_header == header

    async def _slot(self, pools: list[EnginePool]) -> Slot | None:
        """Wait for a slot for the next attempt. None if no replica of `pools` is left, but other pools have one.

        Raises Refused, PoolEmpty or PoolFull.
        """
        runtime, outbound, call, turn = self._runtime, self._outbound, self._call, self._call.turn
        queued_at = time.perf_counter()
        wake_seconds, left_seconds = self._wake_seconds(), self._deadline.left_seconds
        views = call.policy_input.pools if call.policy_input is not None else {}
        request = SlotRequest(
            pools,
            session=turn.affinity if turn is not None else None,
            tenant=call.tenant,
            urgency=urgency_of(call.request.headers.getall("Priority", ()), call.key),
            held=turn.cached.held if turn is not None else {},
            generates=outbound.generates,
            # A replica that has failed to answer is not ready again before a health check has succeeded.
            accepts=self._suits if wake_seconds else self._accepts,
            chosen={pool: view.replica for pool, view in views.items()},
            queue_seconds=min(runtime.upstream.timeouts.queue_seconds, left_seconds),
            wake_seconds=wake_seconds,
            left_seconds=left_seconds,
        )
        try:
            slot = await runtime.admission.acquire(request)
        except PoolEmpty as error:
            if runtime.config.routing.suspended:
                raise _suspended() from error
            replicas = (each for pool in runtime.pools.values() for each in pool.replicas.values())
            failure: Exception = error
            if not all(map(self._separates_tenants, replicas)):
                failure = Refused(
                    Problem.TENANTS_NOT_SEPARATED,
                    "no ready engine separates the cached prefixes of tenants on this endpoint: SGLang needs the "
                    "plugin dps_sglang for it (docs/prefix-cache.md); or set auth.isolateCache to false, so that "
                    "tenants share cached prefixes",
                )
            if wake_seconds:
                raise failure from None
            self._failure = self._failure or failure
            if self._usable(self._pools()) or self._wake_seconds():
                return None
            raise self._failure from None
        if call.attempt is None:
            call.queue_seconds = time.perf_counter() - queued_at
            runtime.metrics.overhead.observe(queued_at - call.started)
            runtime.metrics.queue_time.labels(slot.pool.name.value).observe(call.queue_seconds)
        return slot

    def _wake_seconds(self) -> float:
        """How long to wait for the first replica: 0 if one is ready, or if only a certain one can serve the request."""
        if self._outbound.replica is not None or any(pool.ready for pool in self._runtime.pools.values()):
            return 0.0
        return min(self._runtime.upstream.timeouts.wake_seconds or 0.0, self._deadline.left_seconds)

    async def _attempt(self, slot: Slot) -> bool:
        """Send the request to a replica. Returns whether it has begun to answer.

        Raises UpstreamFailed if it has not, and no other attempt is allowed.
        """
        call, outbound, pool, replica = self._call, self._outbound, slot.pool, slot.replica
        with ExitStack() as held:
            held.enter_context(slot)
            prefill_tokens = 0
            # Without a stream, the first byte is sent when the answer is complete, and nothing shows the prefill's end.
            if call.turn is not None and outbound.streamed:
                prefill_tokens = call.turn.tokens_on(replica).prefill
            reason = self._reason(pool)
            self._attempts[pool.name] += 1
            call.attempt, call.replica = (pool.name, reason), replica.url
            sent_tokens = replica.sent_tokens + prefill_tokens
            replica.prefill_tokens += prefill_tokens
            try:
                try:
                    answer = await self._runtime.upstream.send(
                        replica,
                        outbound,
                        forwarded_headers(
                            call.request.headers, pool.api_key, outbound.headers, call.request_id
                        ),
                        self._deadline,
                        fresh_connection=self._retries.fresh_connection,
                        trust=pool.trust,
                    )
                finally:
                    replica.prefill_tokens -= prefill_tokens
                replica.begun_tokens += prefill_tokens
                held.callback(answer.close)
                content = await _begun(answer, replica) if outbound.buffered else b""
            except UpstreamFailed as error:
                self._runtime.metrics.upstream_failures.labels(pool.name.value, error.kind).inc()
                self._record(pool, replica, error)
                if self._retries.fatal:
                    raise _fatal() from error
                if self._deadline.passed or not self._retries.allowed_after(error):
                    raise
                return False
            if answer.status >= 500:
                pool.record_error(replica)
            else:
                pool.record_success(replica)
            self._resources = held.pop_all()
        self.pool, self.replica, self.reason = pool, replica, reason
        self.answer, self.content, self.sent_tokens = answer, content, sent_tokens
        self.load_at_start = replica.load
        self.retried = self._failure is not None
        return True

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
        if error.fatal:
            self._runtime.fatal_requests.add(*self._sent, replica.url)
        if down:
            pool.suspect(replica)
        elif error.kind in ("timeout", "aborted") or (error.rejected and error.kind != "status_429"):
            pool.record_error(replica)


async def _begun(answer: Answer, replica: Replica) -> bytes:
    """Read an answer to its end or, if it is a stream, to its first content. Returns the body that does not stream.

    Nothing of it has reached the client until then, so the request can still be retried. Raises UpstreamFailed if the
    answer is incomplete, or reports that the engine has not executed the request or has ended it early.
    """
    if not answer.streams:
        content = await whole(answer)
        failure = failure_in(content) if answer.status in (HTTPStatus.OK, HTTPStatus.BAD_REQUEST) else None
        if answer.status != HTTPStatus.OK and (failure is None or failure.status not in RETRYABLE_STATUSES):
            return content
    elif answer.status == HTTPStatus.OK:
        content, failure = b"", await _failure_at_start(answer, replica)
    else:
        return b""
    if failure is None:
        return content
    status = failure.status or HTTPStatus.SERVICE_UNAVAILABLE
    body = orjson.dumps({"message": failure.message, "code": failure.status})
    if status in RETRYABLE_STATUSES:
        kind = "aborted" if failure.status is None else f"status_{status}"
        raise UpstreamFailed(kind, failure.message, Rejection(status, body, None))
    answer.refuse(status)
    return body


async def _failure_at_start(answer: Answer, replica: Replica) -> Failure | None:
    """Read a stream to its first content. Returns the failure that it begins with, if any. Raises UpstreamFailed.

    Some streams, such as those of /v1/responses, begin with an event before the prompt is computed, so the time for the
    first byte applies to the first content.
    """
    if not (found := beginning(answer.first)):
        wait = asyncio.timeout_at(answer.begins_by)
        replica.waits.add(wait)
        try:
            async with wait:
                while not (found := beginning(answer.first)) and await answer.read_on():
                    pass
        except UpstreamBroken as error:
            raise error.as_failure() from error
        except TimeoutError as error:
            raise not_begun(lost=wait not in replica.waits) from error
        finally:
            replica.waits.discard(wait)
    return found if isinstance(found, Failure) else None


async def whole(answer: Answer) -> bytes:
    """The complete body of an answer of which nothing has been relayed. Raises UpstreamFailed."""
    try:
        return await answer.body()
    except UpstreamBroken as error:
        raise error.as_failure() from error


def _fatal() -> UpstreamFailed:
    return UpstreamFailed(
        "fatal",
        "two engines have closed the connection or stopped responding on this request, so that for "
        f"{FATAL_SECONDS:g} s it is not sent to another one",
    )


def _suspended() -> Refused:
    return Refused(Problem.SUSPENDED, "the engines are stopped, because this router is suspended")
