"""Requests that an engine does not answer: retries, failover, time limits and ejected replicas."""

import asyncio
import time

import pytest

from dps_gateway.api.call import TIMEOUT_HEADER
from dps_gateway.pool import Pool
from dps_gateway.upstream import replica as replica_module
from dps_gateway.upstream.replica import ERRORS_TO_EJECT, LATE_CHECKS_TO_FAIL
from dps_gateway.upstream.retries import RETRY_BURST, RETRY_RATIO
from tests.gateway.dispatch.gateway_with_pools import CHAT, FixedStatusEngine, Start, engines
from tests.gateway.servers import until


async def test_rejected_request_is_retried_in_both_pools(start: Start) -> None:
    healthy = FixedStatusEngine()
    gateway = await start(engines(3, status=503), [healthy])
    response = await gateway.post()
    assert (response.status, response.headers["x-dps-pool"]) == (200, "greedy")
    assert gateway.attempts == 3


async def test_request_that_all_replicas_reject_is_attempted_three_times(start: Start) -> None:
    gateway = await start(engines(3, status=503), engines(3, status=503))
    assert (await gateway.post()).status == 503
    assert gateway.attempts == 3


async def test_retries_of_rejected_requests_are_limited_to_a_fraction_of_the_load(start: Start) -> None:
    gateway = await start(engines(3, status=503), engines(3, status=503))
    requests = 100
    statuses = {(await gateway.post(number)).status for number in range(requests)}
    assert statuses == {503}
    assert gateway.attempts <= requests + RETRY_BURST + RETRY_RATIO * requests


async def test_unreachable_replicas_are_not_limited_by_the_retry_budget(start: Start) -> None:
    gateway = await start([FixedStatusEngine()], [FixedStatusEngine()])
    pool = gateway.runtime.pools[Pool.SPECULATIVE]
    for number in range(30):
        pool.set_endpoints([f"http://127.0.0.1:9/{number}"])  # the discard port: connections are refused
        assert (await gateway.post(number)).status == 200
        assert pool.ready == []


async def test_total_timeout_bounds_all_attempts_of_a_stream(start: Start) -> None:
    """Two attempts of the longest duration would take 4 s."""
    timeouts = "{firstByteSeconds: 2, totalSeconds: 2.5}"
    gateway = await start(engines(3, delay=30.0), engines(3, delay=30.0), timeouts)
    started = time.monotonic()
    assert (await gateway.post(stream=True)).status == 504
    assert 2.5 <= time.monotonic() - started < 3.9
    assert gateway.attempts == 2


async def test_stream_that_does_not_begin_in_time_is_tried_once_more(start: Start) -> None:
    gateway = await start(engines(3, delay=3.0), engines(3, delay=3.0), "{firstByteSeconds: 0.2}")
    assert (await gateway.post(stream=True)).status == 502
    assert gateway.attempts == 2


async def test_non_streaming_answer_may_take_longer_than_the_first_byte_timeout(start: Start) -> None:
    gateway = await start(engines(2, delay=0.5), engines(2), "{firstByteSeconds: 0.1}")
    response = await gateway.post()
    assert (response.status, response.headers["x-dps-pool"]) == (200, "speculative")
    assert gateway.attempts == 1


@pytest.mark.parametrize("path", ["/v1/embeddings", CHAT])
async def test_request_that_is_not_streamed_is_not_executed_twice_after_a_timeout(
    start: Start, path: str
) -> None:
    timeouts = "{firstByteSeconds: 0.1, totalSeconds: 0.5}"
    gateway = await start(engines(2, delay=3.0), engines(2, delay=3.0), timeouts)
    response = await gateway.post(path=path, input="hello")
    message = (await response.json())["error"]["message"]
    assert (response.status, gateway.attempts) == (504, 1)
    assert message == "no engine answered within 0.5 s (timeouts.totalSeconds)"


@pytest.mark.parametrize("stream", [True, False])
async def test_time_that_the_client_allows_bounds_all_attempts_and_ejects_no_replica(
    start: Start, stream: bool
) -> None:
    gateway = await start(engines(2, delay=30.0), engines(2, delay=30.0))
    for number in range(2 * ERRORS_TO_EJECT):
        response = await gateway.post(number, headers={TIMEOUT_HEADER: "100"}, stream=stream)
        assert response.status == 504
        assert (await response.json())["error"][
            "message"
        ] == f"no engine answered within 0.1 s ({TIMEOUT_HEADER})"
    assert [len(pool.ready) for pool in gateway.runtime.pools.values()] == [2, 2]


async def test_time_that_the_client_allows_cannot_exceed_the_total_timeout(start: Start) -> None:
    gateway = await start(engines(1, delay=30.0), engines(1, delay=30.0), "{totalSeconds: 0.3}")
    assert (await gateway.post(headers={TIMEOUT_HEADER: "60000"})).status == 504


@pytest.mark.parametrize("sent", ["-1", "1.5", "soon", ""])
async def test_malformed_time_limit_is_refused(start: Start, sent: str) -> None:
    gateway = await start(engines(1), engines(1))
    assert (await gateway.post(headers={TIMEOUT_HEADER: sent})).status == 400
    assert gateway.attempts == 0


async def test_time_limit_of_zero_means_none(start: Start) -> None:
    gateway = await start(engines(1), engines(1))
    assert (await gateway.post(headers={TIMEOUT_HEADER: "0"})).status == 200


async def test_replica_that_keeps_failing_is_ejected(start: Start) -> None:
    failing = FixedStatusEngine(status=500)
    gateway = await start([failing, *engines(2)], engines(1))
    statuses = [(await gateway.post(number)).status for number in range(60)]
    assert failing.requests == statuses.count(500) == ERRORS_TO_EJECT
    assert len(gateway.runtime.pools[Pool.SPECULATIVE].ready) == 2


async def test_replica_that_times_out_is_ejected(start: Start) -> None:
    hanging = FixedStatusEngine(delay=30.0)
    gateway = await start([hanging, *engines(2)], engines(1), "{firstByteSeconds: 0.5}")
    statuses = [(await gateway.post(number, stream=True)).status for number in range(60)]
    assert hanging.requests == ERRORS_TO_EJECT
    assert set(statuses) == {200}


async def test_pool_whose_replicas_all_fail_keeps_serving(start: Start) -> None:
    """Errors of every replica are probably caused by the requests."""
    gateway = await start(engines(2, status=500), engines(1))
    for number in range(40):
        await gateway.post(number)
    assert len(gateway.runtime.pools[Pool.SPECULATIVE].ready) == 1


@pytest.mark.parametrize("broken", [Pool.SPECULATIVE, Pool.GREEDY])
async def test_only_replica_that_keeps_failing_is_ejected_while_the_other_pool_serves(
    start: Start, broken: Pool
) -> None:
    failing, healthy = FixedStatusEngine(status=500), FixedStatusEngine()
    pools = [[failing], [healthy]] if broken is Pool.SPECULATIVE else [[healthy], [failing]]
    policy = "AlwaysSpeculative" if broken is Pool.SPECULATIVE else "AlwaysGreedy"
    gateway = await start(*pools, policy=policy)
    statuses = [(await gateway.post(number)).status for number in range(20)]
    assert statuses == [500] * ERRORS_TO_EJECT + [200] * (20 - ERRORS_TO_EJECT)
    assert not gateway.runtime.pools[broken].ready


async def test_last_replica_of_both_pools_is_not_ejected(start: Start) -> None:
    gateway = await start(engines(1, status=500), engines(1, status=500))
    for number in range(40):
        await gateway.post(number)
    assert sum(len(pool.ready) for pool in gateway.runtime.pools.values()) == 1


async def test_request_whose_answer_breaks_off_is_attempted_twice(start: Start) -> None:
    gateway = await start(engines(3, truncated=True), engines(3, truncated=True))
    assert (await gateway.post()).status == 502
    assert gateway.attempts == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hung", [True, False], ids=["scheduler", "server"])
async def test_request_on_a_replica_that_stops_responding_is_sent_to_another_one(
    start: Start, monkeypatch: pytest.MonkeyPatch, stream: bool, hung: bool
) -> None:
    gateway = await start([FixedStatusEngine(delay=60.0)], engines(1))
    pool = gateway.runtime.pools[Pool.SPECULATIVE]
    (replica,) = pool.replicas.values()
    waiting = asyncio.create_task(gateway.post(stream=stream))
    await until(lambda: gateway.attempts == 1, "the replica has received the request")
    if hung:
        pool.mark_hung(replica)
    else:
        monkeypatch.setattr(replica_module, "LOST_SECONDS", 0.0)
        for _ in range(LATE_CHECKS_TO_FAIL):
            pool.record_late_check(replica)
    response = await waiting
    assert (response.status, response.headers["x-dps-pool"]) == (200, "greedy")
    assert [pool.in_flight for pool in gateway.runtime.pools.values()] == [0, 0]


async def test_request_on_a_busy_replica_is_not_given_up(start: Start) -> None:
    gateway = await start([FixedStatusEngine(delay=0.5)], engines(1))
    pool = gateway.runtime.pools[Pool.SPECULATIVE]
    (replica,) = pool.replicas.values()
    waiting = asyncio.create_task(gateway.post())
    await asyncio.sleep(0.1)
    for _ in range(LATE_CHECKS_TO_FAIL):
        pool.record_late_check(replica)
    response = await waiting
    assert (response.status, response.headers["x-dps-pool"], gateway.attempts) == (200, "speculative", 1)
