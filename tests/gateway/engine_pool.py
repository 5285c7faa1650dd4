"""Engine pools without engines, whose requests are admitted as in the gateway."""

import asyncio
from collections.abc import Collection, Mapping

from dps_gateway.pool import Pool
from dps_gateway.upstream.admission import Accepts, Admission, Slot, SlotRequest
from dps_gateway.upstream.engine_pool import NOTHING_HELD, EnginePool
from dps_gateway.upstream.fair_queue import DEFAULT_URGENCY

NO_REPLICA: frozenset[str] = frozenset()
"""The replicas that a request avoids, if there are none."""

LONG_SECONDS = 60.0
"""A time limit that no test reaches."""


def avoiding(urls: Collection[str]) -> Accepts:
    """Accepts all replicas but those at these URLs."""
    return lambda pool, replica: replica.url not in urls


class SinglePool(EnginePool):
    """A pool of replicas at these URLs, with a queue of its own, whose requests no other pool may serve."""

    def __init__(self, *urls: str, slots: int = 1, queue: int = 10, slow_start_seconds: float = 0.0) -> None:
        super().__init__(Pool.GREEDY, slots, Admission(queue), slow_start_seconds=slow_start_seconds)
        self.set_endpoints(urls)

    async def acquire(
        self,
        session: str | None,
        avoid: frozenset[str],
        timeout_seconds: float,
        tenant: str = "",
        held: Mapping[str, int] = NOTHING_HELD,
    ) -> Slot:
        """Admit one request to the pool."""
        return await self.admission.acquire(
            SlotRequest(
                [self],
                session=session,
                tenant=tenant,
                held=held,
                accepts=avoiding(avoid),
                queue_seconds=timeout_seconds,
            )
        )

    async def request(self, *avoid: str) -> "asyncio.Task[Slot]":
        """A request that has been admitted, or has joined the queue. `avoid` are URLs of replicas."""
        task = asyncio.create_task(self.acquire(None, frozenset(avoid), LONG_SECONDS))
        await asyncio.sleep(0)
        return task


class PoolPair:
    """Both pools, without a replica, and the queue that they share."""

    def __init__(self, max_queued: int = 100, slots: int = 1) -> None:
        self.admission = Admission(max_queued)
        self.pools = {pool: EnginePool(pool, slots, self.admission) for pool in Pool}

    def start(self, *pools: Pool) -> None:
        """Give each of these pools a replica."""
        for pool in pools:
            self.pools[pool].set_endpoints([f"http://{pool}"])

    async def request(
        self,
        *pools: Pool,
        tenant: str = "",
        urgency: int = DEFAULT_URGENCY,
        timeout_seconds: float = LONG_SECONDS,
        wake_seconds: float = 0.0,
    ) -> asyncio.Task[Pool]:
        """A request that one of `pools` may serve. It has been admitted, queued or refused."""
        request = SlotRequest(
            [self.pools[pool] for pool in pools],
            tenant=tenant,
            urgency=urgency,
            queue_seconds=timeout_seconds,
            wake_seconds=wake_seconds,
        )

        async def admitted() -> Pool:
            return (await self.admission.acquire(request)).pool.name

        task = asyncio.create_task(admitted())
        await asyncio.sleep(0)
        return task

    def release(self, pool: Pool) -> None:
        """End a request on the replica of a pool."""
        (replica,) = self.pools[pool].replicas.values()
        self.pools[pool].release(replica)
