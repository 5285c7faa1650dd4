"""Finding a replica that answers: the decision's pool first, then the other one."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDict

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.runtime import Runtime
from dps_gateway.upstream.exchange import Answer, UpstreamBroken, UpstreamFailed
from dps_gateway.upstream.pool import EnginePool, PoolEmpty, PoolFull, Replica

ATTEMPTS_PER_POOL: Final = 3
MAX_LOST: Final = 2
"""Engines that may die under one request. There are requests that kill an engine (SGLang asserts on some); such a
one must not be carried from replica to replica."""


@dataclass(slots=True)
class Placed:
    """A request that a replica has begun to answer. `close` gives the place back."""

    pool: EnginePool
    replica: Replica
    reason: Reason
    answer: Answer
    whole: bytes = b""
    """The answer's body, where it was asked for as a whole."""

    def close(self) -> None:
        self.answer.close()
        self.pool.release(self.replica)


def least_loaded(runtime: Runtime) -> Pool:
    """The pool with the fewest requests a ready replica."""

    def load(pool: Pool) -> float:
        ready = len(runtime.pools[pool].ready)
        return runtime.pools[pool].in_flight / ready if ready else float("inf")

    return min(Pool.GREEDY, Pool.SPECULATIVE, key=load)


async def place(
    runtime: Runtime,
    decision: Decision,
    session: str | None,
    path: str,
    body: bytes | None,
    headers: Callable[[str | None], CIMultiDict[str]],
    started: float,
    *,
    whole: bool,
    method: str = "POST",
) -> Placed:
    """Send the request until a replica begins to answer; `whole`: until one that does not stream has answered.

    Nothing has reached the client yet, so any failure may be tried elsewhere: on another replica, then in the
    other pool. Raises what the last attempt came to: PoolFull, PoolEmpty or UpstreamFailed.
    """
    first, second = runtime.pools[decision.pool], runtime.pools[decision.pool.other]
    plan = [(first, decision.reason), (second, Reason.FAILOVER)]
    # A fixed decision is an experiment's: it waits rather than spill over.
    if decision.reason is not Reason.FIXED and first.ready and not first.has_room and second.has_room:
        plan = [(second, Reason.OVERLOAD)]
    failure: Exception | None = None
    sent = False
    lost: set[str] = set()
    for pool, reason in plan:
        tried: set[str] = set()
        for _ in range(ATTEMPTS_PER_POOL):
            waiting_since = time.perf_counter()
            try:
                replica = await pool.acquire(
                    session, frozenset(tried), runtime.upstream.timeouts.queue_seconds
                )
            except PoolEmpty as error:
                failure = failure or error
                break
            if not sent:
                sent = True
                _observe_start(runtime, pool, started, waiting_since)
            try:
                answer = await runtime.upstream.send(
                    replica.url, path, body, headers(pool.api_key), method, anew=bool(lost)
                )
                placed = Placed(pool, replica, reason, answer)
                if whole and not answer.streams:
                    placed.whole = await _whole(placed)
            except UpstreamFailed as error:
                failure = error
                runtime.metrics.upstream_failures.labels(pool.name.value, error.kind).inc()
                pool.release(replica)
                if error.kind == "disconnect" and replica.url not in lost:
                    lost.add(replica.url)
                    if len(lost) == MAX_LOST:
                        replica.failed()
                        raise
                    continue  # perhaps an idle connection that the engine had closed: once more, on a new one
                tried.add(replica.url)
                if error.kind in ("connect", "disconnect", "broken"):
                    replica.failed()
                continue
            except BaseException:
                pool.release(replica)
                raise
            replica.succeeded()
            return placed
    raise failure or PoolFull("no replica took the request")


async def _whole(placed: Placed) -> bytes:
    try:
        return await placed.answer.body()
    except UpstreamBroken as error:
        placed.answer.close()
        raise UpstreamFailed("broken", str(error)) from error
    except BaseException:
        placed.answer.close()
        raise


def _observe_start(runtime: Runtime, pool: EnginePool, started: float, waiting_since: float) -> None:
    now = time.perf_counter()
    runtime.metrics.overhead.observe(waiting_since - started)
    runtime.metrics.queue_time.labels(pool.name.value).observe(now - waiting_since)
