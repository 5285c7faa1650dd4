"""Finding a replica that answers: first in the pool that the policy chose, then in the other one."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDict

from dps_gateway.api.call import Call
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.runtime import Runtime
from dps_gateway.upstream.exchange import Answer, UpstreamBroken, UpstreamFailed
from dps_gateway.upstream.pool import EnginePool, PoolEmpty, PoolFull, Replica

ATTEMPTS_PER_POOL: Final = 3
MAX_DISCONNECTED: Final = 2
"""Replicas that may close the connection on one request before it fails. Some requests crash SGLang (it fails an
assertion); without this limit one such request could take down every replica."""

_REPLICA_DOWN: Final = frozenset({"connect", "disconnect", "broken"})
"""Kinds of failure after which a replica receives no requests until a health check succeeds."""


@dataclass(frozen=True, slots=True)
class Outbound:
    """A request as it is sent to a replica."""

    method: str
    path: str
    body: bytes | None
    headers: Callable[[str | None], CIMultiDict[str]]
    """The request headers, given the API key of the pool's engines."""
    session: str | None
    """The session whose replica is preferred; None selects the least loaded replica."""
    buffered: bool
    """Whether an answer that does not stream is read completely before any of it is relayed, so that a failure
    halfway through can still be retried."""


@dataclass(slots=True)
class Placed:
    """A request that a replica has begun to answer. The caller must `close` it."""

    pool: EnginePool
    replica: Replica
    reason: Reason
    answer: Answer
    content: bytes = b""
    """The complete body of an answer that was buffered."""

    def close(self) -> None:
        """Release the upstream connection and the replica's slot."""
        self.answer.close()
        self.pool.release(self.replica)


class Retries:
    """Where the attempts of one request have failed, and whether it may be sent again."""

    def __init__(self) -> None:
        self._failed: defaultdict[Pool, set[str]] = defaultdict(set)
        self._disconnected: set[str] = set()

    def avoid(self, pool: Pool) -> frozenset[str]:
        """The URLs of the pool's replicas that are not to be tried again."""
        return frozenset(self._failed[pool])

    @property
    def fresh_connection(self) -> bool:
        """Whether to bypass pooled connections: a crashed engine leaves stale ones behind."""
        return bool(self._disconnected)

    def record(self, pool: Pool, replica: Replica, failure: UpstreamFailed) -> None:
        """Record a failed attempt. Raises `failure` if the request must not be sent again.

        The first disconnect of a replica may only mean that the engine closed an idle connection, so the same
        replica is tried once more, on a fresh connection.
        """
        if failure.kind == "disconnect" and replica.url not in self._disconnected:
            self._disconnected.add(replica.url)
            if len(self._disconnected) < MAX_DISCONNECTED:
                return
            replica.failed()
            raise failure
        self._failed[pool].add(replica.url)
        if failure.kind in _REPLICA_DOWN:
            replica.failed()


def least_loaded(pools: Mapping[Pool, EnginePool]) -> Pool:
    """The pool with the fewest requests in flight per ready replica."""

    def load(pool: Pool) -> float:
        ready = len(pools[pool].ready)
        return pools[pool].in_flight / ready if ready else float("inf")

    return min(Pool.GREEDY, Pool.SPECULATIVE, key=load)


def placement_headers(call: Call, placed: Placed) -> dict[str, str]:
    """The response headers about the request and the pool that answers it."""
    return {
        "x-request-id": call.request_id,
        "x-dps-pool": placed.pool.name.value,
        "x-dps-reason": placed.reason.value,
    }


async def dispatch(call: Call, decision: Decision, outbound: Outbound) -> Placed:
    """Send the request to one replica after another until one begins to answer.

    Nothing has reached the client yet, so every failure can be retried, on another replica or in the other pool.
    Raises the last failure: PoolFull, PoolEmpty or UpstreamFailed.
    """
    runtime = call.runtime
    retries = Retries()
    failure: Exception | None = None
    started = False
    for pool, reason in _pools_to_try(runtime, decision):
        for _ in range(ATTEMPTS_PER_POOL):
            queued_at = time.perf_counter()
            try:
                replica = await pool.acquire(
                    outbound.session, retries.avoid(pool.name), runtime.upstream.timeouts.queue_seconds
                )
            except PoolEmpty as error:
                failure = failure or error
                break
            if not started:
                started = True
                runtime.metrics.overhead.observe(queued_at - call.started)
                runtime.metrics.queue_time.labels(pool.name.value).observe(time.perf_counter() - queued_at)
            try:
                placed = await _send(runtime, pool, replica, reason, outbound, retries.fresh_connection)
            except UpstreamFailed as error:
                pool.release(replica)
                runtime.metrics.upstream_failures.labels(pool.name.value, error.kind).inc()
                failure = error
                retries.record(pool.name, replica, error)
                continue
            except BaseException:
                pool.release(replica)
                raise
            replica.succeeded()
            return placed
    raise failure or PoolFull("no replica accepted the request")


def _pools_to_try(runtime: Runtime, decision: Decision) -> list[tuple[EnginePool, Reason]]:
    first, second = runtime.pools[decision.pool], runtime.pools[decision.pool.other]
    # A fixed decision belongs to an experiment: the request queues instead of moving to the other pool.
    if decision.reason is not Reason.FIXED and first.ready and not first.has_room and second.has_room:
        return [(second, Reason.OVERLOAD)]
    return [(first, decision.reason), (second, Reason.FAILOVER)]


async def _send(
    runtime: Runtime,
    pool: EnginePool,
    replica: Replica,
    reason: Reason,
    outbound: Outbound,
    fresh_connection: bool,
) -> Placed:
    """One attempt. Raises UpstreamFailed."""
    answer = await runtime.upstream.send(
        replica.url,
        outbound.path,
        outbound.body,
        outbound.headers(pool.api_key),
        outbound.method,
        fresh_connection=fresh_connection,
    )
    placed = Placed(pool, replica, reason, answer)
    if outbound.buffered and not answer.streams:
        try:
            placed.content = await answer.body()
        except UpstreamBroken as error:
            answer.close()
            raise UpstreamFailed("broken", str(error)) from error
        except BaseException:
            answer.close()
            raise
    return placed
