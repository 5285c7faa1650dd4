"""What a spec no longer requires is deleted, but not before no pod of an older template needs it."""

from typing import Any

import pytest

from dps_engines.pools import POOLS
from dps_operator.errors import RejectedError
from dps_testkit.operator.routers import MOONCAKE, SMALLEST
from tests.operator.harness import NOW, OperatorHarness, serving
from tests.operator.objects import pod

CREDENTIALS = "dps-router-credentials"
EXTERNAL: dict[str, Any] = {**SMALLEST, "sessionStore": {"urlSecretRef": {"name": "redis", "key": "url"}}}
"""A session store whose Secret may not exist, so that new gateways cannot start."""
REDIS = {("StatefulSet", "qwen-redis"), ("Service", "qwen-redis")}


def existing(harness: OperatorHarness) -> set[tuple[str, str]]:
    """Kind and name of every object in the namespace."""
    return {(kind, name) for kind, _, name in harness.cluster.objects if kind != "Event"}


async def test_managed_redis_is_kept_until_all_gateways_use_the_external_one() -> None:
    harness = await serving({**SMALLEST, "networkPolicy": {}})
    harness.edit({**EXTERNAL, "networkPolicy": {}})
    await harness.reconcile()
    await harness.reconcile()
    used = REDIS | {("NetworkPolicy", "qwen-redis")}
    assert existing(harness) >= used
    harness.rolled_out()
    await harness.reconcile()
    assert not existing(harness) & used
    assert "qwen-redis.password" in harness.object("Secret", CREDENTIALS)["data"]


async def test_managed_redis_is_kept_until_the_last_old_gateway_has_answered_its_requests() -> None:
    """The counts of a Deployment do not include pods that are terminating."""
    harness = await serving(SMALLEST)
    harness.edit(EXTERNAL)
    await harness.reconcile()
    harness.rolled_out()
    draining = pod("qwen-gateway-old", "gateway")
    draining["metadata"]["deletionTimestamp"] = NOW
    harness.cluster.objects["Pod", "serving", "qwen-gateway-old"] = draining
    await harness.reconcile()
    assert existing(harness) >= REDIS
    del harness.cluster.objects["Pod", "serving", "qwen-gateway-old"]
    await harness.reconcile()
    assert not existing(harness) & REDIS


async def test_managed_redis_and_its_password_outlive_a_rollout_that_is_reverted() -> None:
    harness = await serving(SMALLEST)
    password = harness.object("Secret", CREDENTIALS)["data"]
    store = harness.object("StatefulSet", "qwen-redis")["metadata"]["uid"]
    harness.edit(EXTERNAL)
    await harness.reconcile()
    harness.edit(SMALLEST)
    await harness.reconcile()
    assert harness.object("Secret", CREDENTIALS)["data"] == password
    assert harness.object("StatefulSet", "qwen-redis")["metadata"]["uid"] == store


ENGINES_USE: dict[str, tuple[dict[str, Any], dict[str, Any], set[tuple[str, str]]]] = {
    "the volume for models": (
        {**SMALLEST, "model": {**SMALLEST["model"], "cache": {"size": "200Gi"}}},
        SMALLEST,
        {("PersistentVolumeClaim", "qwen-models")},
    ),
    "the volume for compiled kernels": (
        {**SMALLEST, "engine": {"cache": {"claim": {"size": "50Gi"}}}},
        SMALLEST,
        {("PersistentVolumeClaim", "qwen-engine-cache")},
    ),
    "the Mooncake master": (
        MOONCAKE,
        {name: value for name, value in MOONCAKE.items() if name != "prefixCache"},
        {
            ("Deployment", "qwen-mooncake"),
            ("Service", "qwen-mooncake"),
            ("NetworkPolicy", "qwen-mooncake"),
        },
    ),
}


@pytest.mark.parametrize(("before", "after", "used"), ENGINES_USE.values(), ids=ENGINES_USE.keys())
async def test_what_engines_use_is_kept_until_both_pools_have_been_rolled_out(
    before: dict[str, Any], after: dict[str, Any], used: set[tuple[str, str]]
) -> None:
    harness = await serving(before)
    assert existing(harness) >= used
    harness.edit(after)
    await harness.reconcile()
    assert "starts after that of the speculative pool" in harness.condition("Progressing")["message"]
    assert existing(harness) >= used, "both pools have pods of the old template"
    harness.available("qwen-speculative")
    harness.available("qwen-gateway", 2)
    await harness.reconcile()
    assert existing(harness) >= used, "the rollout of the greedy pool has only begun"
    harness.rolled_out()
    await harness.reconcile()
    assert not existing(harness) & used


async def test_volume_is_deleted_when_the_engines_that_used_it_have_been_suspended() -> None:
    cached = {**SMALLEST, "model": {**SMALLEST["model"], "cache": {"size": "200Gi"}}}
    harness = await serving(cached)
    harness.edit({**SMALLEST, "suspend": True})
    await harness.reconcile()
    for _ in POOLS:
        harness.rolled_out()
        await harness.reconcile()
    assert harness.object("Deployment", "qwen-greedy")["status"]["replicas"] == 0
    assert harness.cluster.names("PersistentVolumeClaim") == set()


async def test_other_objects_are_deleted_during_a_rollout() -> None:
    exposed = {**SMALLEST, "gateway": {"ingress": {"host": "llm.example.com"}}, "networkPolicy": {}}
    harness = await serving(exposed)
    harness.edit(EXTERNAL)
    await harness.reconcile()
    assert harness.cluster.names("Ingress") == set()
    assert harness.cluster.names("NetworkPolicy") == {"qwen-redis"}


async def test_store_is_kept_while_the_api_server_rejects_the_gateways_that_do_not_need_it() -> None:
    harness = await serving(SMALLEST)
    harness.cluster.fail["apply", "Deployment"] = RejectedError("spec is invalid", 422)
    harness.edit(EXTERNAL)
    await harness.reconcile()
    assert existing(harness) >= REDIS
