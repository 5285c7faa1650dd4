"""One engine pool with a queue of its own."""

from collections.abc import Mapping

from dps_gateway.pool import Pool
from dps_gateway.upstream.admission import Admission, Choice, ReplicaRequest
from dps_gateway.upstream.affinity import NOTHING_HELD
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import Replica


class SinglePool(EnginePool):
    """A pool whose requests no other pool may serve."""

    def __init__(self, slots: int = 1, queue: int = 10, slow_start_seconds: float = 0.0) -> None:
        super().__init__(Pool.GREEDY, slots, Admission(queue), slow_start_seconds=slow_start_seconds)

    async def acquire(
        self,
        session: str | None,
        avoid: frozenset[str],
        timeout_seconds: float,
        tenant: str = "",
        held: Mapping[str, int] = NOTHING_HELD,
    ) -> Replica:
        """Admit one request to the pool."""
        request = ReplicaRequest([Choice(self, avoid)], session, tenant, held=held)
        return (await self.admission.acquire(request, timeout_seconds))[1]
