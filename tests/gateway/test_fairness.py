"""One tenant's burst hardly raises the latency of another, measured in virtual time."""

import asyncio
import math
import random
import selectors
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import pytest

from dps_gateway.pool import Pool
from dps_gateway.upstream.admission import Admission, Choice, ReplicaRequest
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import Configuration, Replica

RUNNING = 48
"""Requests that an engine runs at the same time: SGLang's default with speculative decoding."""

MEAN_SECONDS = 4.0
"""The mean duration of a request on an engine. It has a log-normal distribution."""

SIGMA = 0.5

QUIET_REQUESTS = 1000
QUIET_PER_SECOND = 8.0
"""A third of what the two engines can serve."""

BURST_REQUESTS = 1500
BURST_AT_SECONDS = 50.0
BURST_SECONDS = BURST_REQUESTS * MEAN_SECONDS / (2 * RUNNING)
"""The time that the engines need for the burst alone."""

MAX_INCREASE = 1.2


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock advances to the next timer as soon as there is nothing else to do."""

    def __init__(self) -> None:
        self._selector_of_time = _VirtualSelector()
        super().__init__(self._selector_of_time)

    def time(self) -> float:
        return self._selector_of_time.now


class _VirtualSelector(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class Engine:
    """Runs at most RUNNING requests; the others wait in order of arrival, as in SGLang."""

    def __init__(self) -> None:
        self._running = asyncio.Semaphore(RUNNING)

    async def serve(self, seconds: float) -> None:
        async with self._running:
            await asyncio.sleep(seconds)


@dataclass
class Traffic:
    """The requests of one tenant."""

    tenant: str
    arrivals: list[float]
    durations: list[float]


def traffic(tenant: str, arrivals: list[float], seed: str) -> Traffic:
    rng = random.Random(seed)
    mu = math.log(MEAN_SECONDS) - SIGMA**2 / 2
    return Traffic(tenant, arrivals, [rng.lognormvariate(mu, SIGMA) for _ in arrivals])


def quiet() -> Traffic:
    rng = random.Random("arrivals")
    arrivals = list(accumulate(rng.expovariate(QUIET_PER_SECOND) for _ in range(QUIET_REQUESTS)))
    return traffic("quiet", arrivals, "quiet")


def burst(tenant: str) -> Traffic:
    return traffic(tenant, [BURST_AT_SECONDS] * BURST_REQUESTS, "burst")


class Gateway:
    """Two pools of one engine each, behind the gateway's own admission."""

    def __init__(self, *, reports_limit: bool) -> None:
        self.admission = Admission(max_queued=2 * BURST_REQUESTS)
        self.pools = {pool: EnginePool(pool, 256, self.admission) for pool in Pool}
        self.engines: dict[Replica, Engine] = {}
        for name, pool in self.pools.items():
            pool.set_endpoints([f"http://{name}"])
            (replica,) = pool.replicas.values()
            self.engines[replica] = Engine()
            if reports_limit:
                pool.record_configuration(replica, Configuration(max_running=RUNNING))

    async def latency(self, tenant: str, number: int, arrival: float, seconds: float) -> float:
        """The time from the arrival of a request to the end of its answer."""
        await asyncio.sleep(arrival)
        preferred = Pool.SPECULATIVE if number % 2 else Pool.GREEDY
        choices = [Choice(self.pools[preferred]), Choice(self.pools[preferred.other])]
        request = ReplicaRequest(choices, session=f"{tenant}-{number}", tenant=tenant)
        pool, replica = await self.admission.acquire(request, timeout_seconds=1e6)
        await self.engines[replica].serve(seconds)
        pool.release(replica)
        return asyncio.get_running_loop().time() - arrival


def p95_of_quiet(*loads: Traffic, reports_limit: bool = True) -> float:
    """The 95th percentile of the latencies (seconds) of the requests of `quiet` that arrive while a burst is served."""

    async def measure() -> list[float]:
        gateway = Gateway(reports_limit=reports_limit)
        served = [
            [
                asyncio.create_task(gateway.latency(load.tenant, number, *each))
                for number, each in enumerate(zip(load.arrivals, load.durations, strict=True))
            ]
            for load in (quiet(), *loads)
        ]
        latencies = [await asyncio.gather(*tasks) for tasks in served]
        return [
            seconds
            for seconds, arrival in zip(latencies[0], quiet().arrivals, strict=True)
            if BURST_AT_SECONDS <= arrival < BURST_AT_SECONDS + BURST_SECONDS
        ]

    with virtual_time() as loop:
        latencies = sorted(loop.run_until_complete(measure()))
    return latencies[math.ceil(0.95 * len(latencies)) - 1]


@contextmanager
def virtual_time() -> Iterator[VirtualTimeLoop]:
    loop = VirtualTimeLoop()
    try:
        yield loop
    finally:
        loop.close()


@pytest.fixture(scope="module")
def alone() -> float:
    """The 95th percentile without a burst."""
    return p95_of_quiet()


def test_burst_of_another_tenant_raises_the_95th_percentile_by_at_most_a_fifth(alone: float) -> None:
    assert p95_of_quiet(burst("noisy")) <= MAX_INCREASE * alone


def test_burst_of_the_same_tenant_raises_its_95th_percentile(alone: float) -> None:
    assert p95_of_quiet(burst("quiet")) > MAX_INCREASE * alone


def test_burst_would_raise_latency_if_it_waited_in_the_engines_queue(alone: float) -> None:
    assert p95_of_quiet(burst("noisy"), reports_limit=False) > MAX_INCREASE * alone
