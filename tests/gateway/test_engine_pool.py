"""A pool of replicas: those that are added, removed and unavailable, and the speed that it observes."""

from collections.abc import Callable

import pytest

from dps_gateway.upstream.admission import PoolEmpty
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import LATE_CHECKS_TO_FAIL, Replica
from dps_testkit.engine_pool import SinglePool

ANSWERED = [EnginePool.mark_available, EnginePool.record_success]
"""A health check, or a request, that a replica has answered."""


async def test_pool_without_a_ready_replica_raises_pool_empty() -> None:
    engines = SinglePool("a", "b")
    engines.mark_unavailable(engines.replicas["a"])
    with pytest.raises(PoolEmpty, match="no replica of the greedy pool is ready"):
        await engines.acquire("s", frozenset({"b"}), 1.0)
    engines.mark_available(engines.replicas["a"])
    assert (await engines.acquire("s", frozenset({"b"}), 1.0)).url == "a"


async def test_replicas_that_remain_endpoints_keep_their_load() -> None:
    engines = SinglePool("a", "b")
    busy = await engines.acquire(None, frozenset({"b"}), 1.0)
    engines.set_endpoints(["a", "c"])
    assert engines.replicas["a"] is busy
    assert sorted(engines.replicas) == ["a", "c"]
    engines.set_endpoints(["c"])
    engines.release(busy)
    assert engines.in_flight == 0


async def test_requests_on_a_removed_replica_count_and_still_do_if_it_returns() -> None:
    engines = SinglePool("a", "b")
    busy = await engines.acquire(None, frozenset({"b"}), 1.0)
    engines.set_endpoints(["b"])
    assert engines.in_flight == 1
    engines.set_endpoints(["c"])
    engines.set_endpoints(["a", "b"])
    assert engines.replicas["a"] is busy
    assert (engines.in_flight, engines.replicas["a"].in_flight) == (1, 1)
    engines.set_endpoints(["b"])
    engines.release(busy)
    assert engines.all_replicas == [engines.replicas["b"]]


def test_speed_is_a_running_mean_of_observations() -> None:
    engines = SinglePool("a", "b")
    engines.observe(1.0, 0.02)
    engines.observe(2.0, None)
    assert len(engines.ready) == 2
    assert engines.time_to_first_token_seconds == pytest.approx(1.1)
    assert engines.time_per_output_token_seconds == 0.02


@pytest.mark.parametrize("answered", ANSWERED)
def test_late_health_checks_count_until_the_replica_answers(
    answered: Callable[[EnginePool, Replica], None],
) -> None:
    engines = SinglePool("a")
    (replica,) = engines.ready
    for _ in range(2):
        for _ in range(LATE_CHECKS_TO_FAIL - 1):
            engines.record_late_check(replica)
        assert engines.ready == [replica]
        answered(engines, replica)
    for _ in range(LATE_CHECKS_TO_FAIL):
        engines.record_late_check(replica)
    assert engines.ready == []
