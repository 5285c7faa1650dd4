"""The share of requests of a replica that joins a pool, or returns to it."""

from collections.abc import Callable

import pytest

from dps_gateway.upstream.replica import SMALLEST_WEIGHT, Replica
from tests.gateway.engine_pool import NO_REPLICA, SinglePool


def ejected(engines: SinglePool, replica: Replica) -> None:
    """Eject the replica, and let the probe after its ejection succeed."""
    now = 1000.0
    ejected = engines.replicas[replica.url] = Replica(replica.url, lambda: now, engines.slow_start_seconds)
    now += ejected.eject()
    engines.record_success(ejected)


def failed(engines: SinglePool, replica: Replica) -> None:
    """Let the replica be unavailable for a minute."""
    now = 1000.0
    failed = engines.replicas[replica.url] = Replica(replica.url, lambda: now, engines.slow_start_seconds)
    engines.mark_unavailable(failed)
    now += 60.0
    engines.mark_available(failed)


def hung(engines: SinglePool, replica: Replica) -> None:
    engines.mark_hung(replica)
    engines.record_token(replica)


def added(engines: SinglePool, replica: Replica) -> None:
    engines.set_endpoints(set(engines.replicas) - {replica.url})
    engines.set_endpoints([*engines.replicas, replica.url])


RETURNS = pytest.mark.parametrize("returns", [ejected, failed, hung, added])
"""The replica leaves the pool, and returns to it."""

Returns = Callable[[SinglePool, Replica], None]

NEVER_ENDS = 1e9


@RETURNS
@pytest.mark.parametrize("session", [True, False])
async def test_replica_in_slow_start_receives_a_part_of_its_share(returns: Returns, session: bool) -> None:
    engines = SinglePool("a", "b", "c", slots=100, slow_start_seconds=NEVER_ENDS)
    returns(engines, engines.replicas["a"])
    for number in range(60):
        await engines.acquire(f"s{number}" if session else None, NO_REPLICA, 1.0)
    assert (engines.replicas["a"].in_flight, engines.in_flight) == (3, 60)


async def test_replica_that_was_unavailable_for_a_moment_has_its_full_share() -> None:
    engines = SinglePool("a", "b", slots=100, slow_start_seconds=NEVER_ENDS)
    replica = engines.replicas["a"]
    engines.mark_unavailable(replica)
    engines.mark_available(replica)
    assert replica.weight == 1.0


@RETURNS
async def test_replica_in_slow_start_is_used_if_the_others_are_full(returns: Returns) -> None:
    engines = SinglePool("a", "b", slots=2, slow_start_seconds=NEVER_ENDS)
    returns(engines, engines.replicas["a"])
    for number in range(4):
        await engines.acquire(f"s{number}", NO_REPLICA, 1.0)
    assert {url: replica.in_flight for url, replica in engines.replicas.items()} == {"a": 2, "b": 2}


async def test_first_replicas_begin_with_their_full_share() -> None:
    engines = SinglePool("a", slow_start_seconds=NEVER_ENDS)
    assert engines.replicas["a"].weight == 1.0
    engines.set_endpoints([])
    engines.set_endpoints(["a", "b"])
    assert [replica.weight for replica in engines.replicas.values()] == [1.0, 1.0]
    engines.set_endpoints(["a", "b", "c"])
    assert [replica.weight for replica in engines.replicas.values()] == [1.0, 1.0, SMALLEST_WEIGHT]
