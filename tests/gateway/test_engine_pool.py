"""A pool of replicas: those that are added, removed and unavailable, and the speed that it observes."""

from collections.abc import Callable

import pytest

from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import LATE_CHECKS_TO_FAIL, Replica
from tests.gateway.engine_pool import SinglePool

ANSWERED = [EnginePool.mark_available, EnginePool.record_success]
"""A health check, or a request, that a replica has answered."""


async def test_requests_on_a_removed_replica_count_and_still_do_if_it_returns() -> None:
    engines = SinglePool("a", "b")
    busy = await engines.acquire(None, frozenset({"b"}), 1.0)
    engines.set_endpoints(["b"])
    assert engines.in_flight == 1
    engines.set_endpoints(["c"])
    engines.set_endpoints(["a", "b"])
    assert engines.replicas["a"] is busy.replica
    assert (engines.in_flight, engines.replicas["a"].in_flight) == (1, 1)
    engines.set_endpoints(["b"])
    busy.release()
    assert engines.all_replicas == [engines.replicas["b"]]


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
