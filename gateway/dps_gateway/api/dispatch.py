"""Finding a replica that answers: first in the pool that the policy chose, then in the other one."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDict

from dps_gateway.api.call import Call
from dps_gateway.api.errors import DeadlineExceeded, Suspended
from dps_gateway.api.request import TIMEOUT_HEADER
from dps_gateway.pool import Pool
from dps_gateway.prompt_tokens import CachedPrompt
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.runtime import Runtime
from dps_gateway.upstream.admission import Choice, PoolEmpty, PoolFull, ReplicaRequest
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.exchange import Answer, UpstreamBroken, UpstreamFailed
from dps_gateway.upstream.replica import Replica
from dps_gateway.upstream.retries import Retries

ATTEMPTS_PER_POOL: Final = 3


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
    """The tenant, between which the queue is fair."""
    urgency: int
    """The urgency in the queue, from 0 (served first) to 7."""
    streamed: bool
    """Whether the engine is expected to stream the answer, so that timeouts.firstByteSeconds applies."""
    buffered: bool
    """Whether a non-streaming answer is read completely before any of it is relayed, so that the request can still be
    retried if reading fails."""
    prompt: CachedPrompt | None
    """The prompt, which determines the preferred replica together with the session; None if it is unknown."""
    replica: str | None = None
    """The base URL of the only replica that can serve the request, in the pool of the decision. None if all can."""


@dataclass(slots=True)
class Placed:
    """A request that a replica has begun to answer. The caller must `close` it."""

    pool: EnginePool
    replica: Replica
    reason: Reason
    answer: Answer
    content: bytes = b""
    """The complete body of an answer that was buffered."""
    retried: bool = False
    """Whether other attempts failed before."""

    def close(self) -> None:
        """Release the upstream connection and the replica's slot."""
        self.answer.close()
        self.pool.release(self.replica)


def least_loaded(pools: Mapping[Pool, EnginePool]) -> Pool:
    """The pool with the fewest requests in flight per ready replica."""

    def load(pool: Pool) -> float:
        ready = len(pools[pool].ready)
        return pools[pool].in_flight / ready if ready else float("inf")

    return min(Pool.GREEDY, Pool.SPECULATIVE, key=load)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of the time in which a request must be answered."""

    seconds: float
    """The time limit, from the request's arrival if the client has set it."""
    at: float
    """When it ends (`time.monotonic()`)."""
    of_client: bool
    """Whether the client has set the limit."""

    @classmethod
    def of(cls, call: Call) -> "Deadline":
        """timeouts.totalSeconds, or the time that the client allows if it is shorter."""
        now = time.monotonic()
        total, allowed = call.runtime.upstream.timeouts.total_seconds, call.timeout_seconds
        if allowed is None or allowed > total:
            return cls(total, now + total, of_client=False)
        return cls(allowed, now + allowed - (time.perf_counter() - call.started), of_client=True)

    @property
    def passed_for_client(self) -> bool:
        """Whether the client's time is over. The failure of an attempt may then not be the replica's."""
        return self.of_client and time.monotonic() >= self.at


async def dispatch(call: Call, decision: Decision, outbound: Outbound) -> Placed:
    """Send the request to one replica after another until one begins to answer.

    Nothing has reached the client yet, so a failure can be retried (see `Retries`), on another replica or in the other
    pool. One deadline bounds all attempts together. Raises DeadlineExceeded if the client's time is over, Suspended if
    the engines are stopped, else the last failure: PoolFull, PoolEmpty or UpstreamFailed.
    """
    runtime = call.runtime
    if runtime.config.routing.suspended:
        raise _suspended()
    if not runtime.pools[decision.pool].ready:
        runtime.metrics.pool_unavailable.labels(decision.pool.value).inc()
    deadline = Deadline.of(call)
    try:
        return await _dispatch(call, decision, outbound, deadline)
    except (PoolEmpty, PoolFull, UpstreamFailed) as error:
        if deadline.passed_for_client:
            raise DeadlineExceeded(
                f"no engine answered within {deadline.seconds:g} s ({TIMEOUT_HEADER})"
            ) from error
        raise


async def _dispatch(call: Call, decision: Decision, outbound: Outbound, deadline: Deadline) -> Placed:
    runtime = call.runtime
    timeouts = runtime.upstream.timeouts
    retries = Retries(runtime.retry_budget, streamed=outbound.streamed)
    attempts: Counter[Pool] = Counter()
    failure: Exception | None = None
    while choices := _choices(runtime, decision, retries, attempts, outbound.replica):
        queued_at = time.perf_counter()
        left = max(0.0, deadline.at - time.monotonic())
        patience = min(timeouts.queue_seconds, left)
        wake_seconds = _wake_seconds(runtime, outbound, left)
        if wake_seconds:
            # A replica on which the request has failed is not ready again before a health check has succeeded.
            choices = [Choice(choice.pool) for choice in choices]
        held = outbound.prompt.held if outbound.prompt is not None else {}
        request = ReplicaRequest(choices, outbound.session, outbound.tenant, outbound.urgency, held)
        try:
            chosen, replica = await runtime.admission.acquire(request, patience, wake_seconds)
        except PoolEmpty as error:
            if runtime.config.routing.suspended:
                raise _suspended() from error
            if wake_seconds:
                raise
            failure = failure or error
            if not any(
                each.pool.usable(each.avoid)
                for each in _choices(runtime, decision, retries, attempts, outbound.replica)
            ) and not _wake_seconds(runtime, outbound, deadline.at - time.monotonic()):
                raise failure from None
            continue
        pool = runtime.pools[Pool(chosen.name)]
        if not attempts:
            runtime.metrics.overhead.observe(queued_at - call.started)
            runtime.metrics.queue_time.labels(pool.name.value).observe(time.perf_counter() - queued_at)
        reason = _reason(runtime, decision, pool, attempts)
        attempts[pool.name] += 1
        call.headers |= {"x-dps-pool": pool.name.value, "x-dps-reason": reason.value}
        try:
            placed = await _send(runtime, pool, replica, reason, outbound, deadline, retries.fresh_connection)
        except UpstreamFailed as error:
            failure = error
            runtime.metrics.upstream_failures.labels(pool.name.value, error.kind).inc()
            down = retries.record(pool.name, replica.url, error)
            if deadline.passed_for_client:
                pass
            elif down:
                pool.mark_unavailable(replica)
            elif error.kind == "timeout" or (error.rejected and error.kind != "status_429"):
                pool.record_error(replica)
            pool.release(replica)
            if time.monotonic() >= deadline.at or not retries.allowed_after(error):
                raise
            continue
        except BaseException:
            pool.release(replica)
            raise
        placed.retried = failure is not None
        if placed.answer.status >= 500:
            pool.record_error(replica)
        else:
            pool.record_success(replica)
        return placed
    raise failure or PoolFull("no replica accepted the request")


def _choices(
    runtime: Runtime, decision: Decision, retries: Retries, attempts: Mapping[Pool, int], replica: str | None
) -> list[Choice]:
    """The pools that may serve the next attempt: the one that the policy chose, and the other if the first is full.

    Overload does not change a FIXED decision: a baseline policy's pool must not change in an experiment, and for a
    request without a session `least_loaded` has already compared the pools. The other pool is then used only if no
    replica of the first is left, and if neither has one, the request waits for the first one of either pool. `replica`
    is the only one that may serve the request, if it is not None.
    """
    choices = [
        Choice(runtime.pools[pool], retries.avoid(pool))
        for pool in (decision.pool, decision.pool.other)
        if attempts[pool] < ATTEMPTS_PER_POOL and retries.may_stay(pool)
    ]
    if replica is not None:
        pool = runtime.pools[decision.pool]
        others = pool.replicas.keys() - {replica}
        return [Choice(pool, each.avoid | others) for each in choices if each.pool is pool]
    if decision.reason is not Reason.FIXED:
        return choices
    usable = [choice for choice in choices if choice.pool.usable(choice.avoid)]
    return usable[:1] or choices


def _wake_seconds(runtime: Runtime, outbound: Outbound, left_seconds: float) -> float:
    """How long the request may wait for the first replica: 0 if one is ready, or if only a certain one can serve it."""
    if outbound.replica is not None or any(pool.ready for pool in runtime.pools.values()):
        return 0.0
    return max(0.0, min(runtime.upstream.timeouts.wake_seconds or 0.0, left_seconds))


def _suspended() -> Suspended:
    return Suspended("the engines are stopped, because this router is suspended")


def _reason(runtime: Runtime, decision: Decision, pool: EnginePool, attempts: Mapping[Pool, int]) -> Reason:
    if pool.name is decision.pool:
        return decision.reason
    tried = attempts[decision.pool] > 0
    return Reason.FAILOVER if tried or not runtime.pools[decision.pool].ready else Reason.OVERLOAD


async def _send(
    runtime: Runtime,
    pool: EnginePool,
    replica: Replica,
    reason: Reason,
    outbound: Outbound,
    deadline: Deadline,
    fresh_connection: bool,
) -> Placed:
    """Send the request to one replica. Raises UpstreamFailed."""
    prefill_tokens = _prefill_tokens(outbound, replica)
    replica.prefill_tokens += prefill_tokens
    try:
        answer = await runtime.upstream.send(
            replica.url,
            outbound.path,
            outbound.body,
            outbound.headers(pool.api_key),
            outbound.method,
            total_seconds=deadline.seconds,
            deadline=deadline.at,
            streamed=outbound.streamed,
            fresh_connection=fresh_connection,
            trust=pool.trust,
        )
    finally:
        replica.prefill_tokens -= prefill_tokens
    placed = Placed(pool, replica, reason, answer)
    if outbound.buffered and not answer.streams:
        try:
            placed.content = await answer.body()
        except UpstreamBroken as error:
            answer.close()
            raise UpstreamFailed("timeout" if error.timed_out else "broken", str(error)) from error
        except BaseException:
            answer.close()
            raise
    return placed


def _prefill_tokens(outbound: Outbound, replica: Replica) -> int:
    """The tokens that the replica has to prefill, if the end of the prefill can be observed; otherwise 0.

    The first byte of an answer that is not streamed is sent when the answer is complete.
    """
    if outbound.prompt is None or not outbound.streamed:
        return 0
    return outbound.prompt.tokens(replica.id).prefill
