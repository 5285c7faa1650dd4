"""The Secret with the random values of the DPSRouters of a namespace."""

import base64
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from dps_operator.credentials import release
from dps_operator.errors import ClusterError
from dps_testkit.operator.routers import PREFIX_CACHE, SMALLEST
from dps_testkit.operator.world import KEY, World


@pytest.fixture
async def world() -> World:
    made = World(SMALLEST)
    await made.reconcile()
    return made


REDIS_ENTRIES = {"qwen-redis.password", "qwen-redis.auth.conf", "qwen-redis.url"}


def credentials(world: World) -> dict[str, str]:
    """The entries of the Secret with random values."""
    data: dict[str, str] = world.object("Secret", "dps-router-credentials")["data"]
    return data


async def test_password_is_created_once(world: World) -> None:
    first = credentials(world)
    world.restart()
    await world.reconcile()
    assert credentials(world) == first
    assert set(first) == REDIS_ENTRIES
    assert len(base64.b64decode(first["qwen-redis.password"])) >= 32


async def test_secret_of_the_prefix_cache_is_created_once_and_removed_with_the_common_cache() -> None:
    world = World(PREFIX_CACHE)
    await world.reconcile()
    first = credentials(world)
    assert set(first) == REDIS_ENTRIES | {"qwen-prefix-cache.secret"}
    world.edit({**PREFIX_CACHE, "prefixCache": {**PREFIX_CACHE["prefixCache"], "mode": "Separate"}})
    await world.reconcile()
    assert credentials(world) == {name: first[name] for name in REDIS_ENTRIES}
    assert world.cluster.names("PersistentVolumeClaim") == set()


async def test_secret_and_claim_of_the_prefix_cache_are_kept_while_the_pools_cannot_share() -> None:
    world = World(PREFIX_CACHE)
    await world.reconcile()
    before = credentials(world)
    world.edit({**PREFIX_CACHE, "engine": {"version": "0.5.22"}})
    await world.reconcile()
    assert world.condition("PrefixCacheShared")["status"] == "False"
    assert credentials(world) == before
    assert world.cluster.names("PersistentVolumeClaim") == {"qwen-prefix-cache"}


async def test_replaced_secret_of_the_prefix_cache_restarts_the_engines() -> None:
    world = World(PREFIX_CACHE)
    await world.reconcile()
    before = world.object("Deployment", "qwen-greedy")["spec"]["template"]["metadata"]["annotations"]
    del world.cluster.objects["Secret", "serving", "dps-router-credentials"]
    await world.reconcile()
    after = world.object("Deployment", "qwen-greedy")["spec"]["template"]["metadata"]["annotations"]
    assert set(before) == set(after) == {"dpsrouter.io/prefix-cache-secret"}
    assert before != after


async def test_secret_of_that_name_that_the_operator_did_not_create_is_not_changed() -> None:
    world = World(SMALLEST)
    metadata = {"name": "dps-router-credentials", "namespace": "serving"}
    foreign = world.cluster.store({"apiVersion": "v1", "kind": "Secret", "metadata": metadata}, "kubectl")
    await world.reconcile()
    assert world.condition("SpecValid")["message"].startswith(
        "Secret dps-router-credentials, which the operator uses, exists and was not created by it; delete the Secret"
    )
    assert world.object("Secret", "dps-router-credentials") == foreign


async def test_deleted_router_removes_its_values_from_the_secret_that_others_use(world: World) -> None:
    own = credentials(world)
    await release(world.cluster, ("serving", "qwen"))
    assert credentials(world) == own, "the Secret is garbage-collected with its last owner"
    metadata = {"name": "dps-router-credentials", "namespace": "serving"}
    other = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "data": {"other-redis.password": "eA=="},
    }
    world.cluster.store(other, "dps-operator.other")
    del world.cluster.objects["DPSRouter", *KEY]
    await world.reconcile()
    assert credentials(world) == other["data"]


@pytest.mark.parametrize(("status", "outcome"), [(409, nullcontext()), (500, pytest.raises(ClusterError))])
async def test_secret_that_is_deleted_meanwhile_needs_no_removal(
    world: World, status: int, outcome: AbstractContextManager[Any]
) -> None:
    credentials(world)["other-redis.password"] = "eA=="
    world.cluster.fail["apply", "Secret"] = ClusterError("conflict", status)
    with outcome:
        await release(world.cluster, ("serving", "qwen"))
