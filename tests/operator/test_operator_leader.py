"""Leader election: exactly one replica holds the Lease, and another takes over when it is lost."""

import asyncio

import pytest

from dps_operator import lease as leader
from dps_operator.errors import ClusterError, LeadershipLostError
from dps_operator.lease import DURATION_SECONDS, RENEW_DEADLINE_SECONDS, Leadership
from tests.operator.fake_cluster import FakeCluster

NAME = ("Lease", "system", "dps")


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def lease(cluster: FakeCluster, identity: str) -> Leadership:
    return Leadership(cluster, "system/dps", identity)


def holder(cluster: FakeCluster) -> str:
    return str(cluster.objects[NAME]["spec"]["holderIdentity"])


async def test_a_lease_that_is_not_renewed_is_taken_over_and_its_holder_notices(cluster: FakeCluster) -> None:
    a, b = lease(cluster, "a"), lease(cluster, "b")
    assert await a.try_acquire(0)
    assert not await b.try_acquire(100)
    assert not await b.try_acquire(100 + DURATION_SECONDS - 1)
    assert holder(cluster) == "a"
    assert await b.try_acquire(100 + DURATION_SECONDS)
    assert holder(cluster) == "b"
    assert cluster.objects[NAME]["spec"]["leaseTransitions"] == 1
    with pytest.raises(LeadershipLostError, match="held by b"):
        await a.renew()


async def test_a_released_lease_is_taken_over_at_once(cluster: FakeCluster) -> None:
    a, b = lease(cluster, "a"), lease(cluster, "b")
    await a.try_acquire(0)
    assert not await b.try_acquire(0)
    a.leading.set()
    await a.release()
    assert await b.try_acquire(1)
    await a.release()
    assert holder(cluster) == "b"


async def test_of_two_replicas_that_take_the_lease_at_once_one_succeeds(cluster: FakeCluster) -> None:
    await lease(cluster, "old").try_acquire(0)
    rivals = [lease(cluster, "a"), lease(cluster, "b")]
    for rival in rivals:
        assert not await rival.try_acquire(0)
    results = await asyncio.gather(*(rival.try_acquire(DURATION_SECONDS) for rival in rivals))
    assert sorted(results) == [False, True]
    assert holder(cluster) == ("a", "b")[results.index(True)]


async def test_a_leader_that_cannot_renew_gives_up_before_its_lease_may_be_taken(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RENEW_DEADLINE_SECONDS < DURATION_SECONDS
    for name in ("RENEW_SECONDS", "RETRY_SECONDS", "RENEW_DEADLINE_SECONDS"):
        monkeypatch.setattr(leader, name, 0.01)
    a = lease(cluster, "a")
    running = asyncio.create_task(a.run())
    await a.leading.wait()
    cluster.fail["get", "Lease"] = ClusterError("unavailable", 503)
    with pytest.raises(LeadershipLostError, match="could not be renewed in time"):
        await running


async def test_a_replica_without_a_lease_leads_at_once(cluster: FakeCluster) -> None:
    leadership = Leadership(cluster, "")
    await leadership.run()
    assert leadership.leading.is_set()
