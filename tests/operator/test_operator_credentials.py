"""The Secret with the random values of the DPSRouters of a namespace."""

import base64
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import yaml

from dps_operator.api import API_VERSION, KIND
from dps_operator.credentials import release
from dps_operator.errors import ClusterError
from dps_operator.kinds import SECRET
from dps_testkit.operator.harness import KEY, OperatorHarness
from dps_testkit.operator.routers import PREFIX_CACHE, SMALLEST

OTHER = {"apiVersion": API_VERSION, "kind": KIND, "name": "other", "uid": "uid-other"}
"""The owner reference of another DPSRouter in the same namespace."""
ENTRIES = {"qwen-gateway.admin-token", "qwen-redis.password", "qwen-redis.auth.conf", "qwen-redis.url"}


def credentials(harness: OperatorHarness) -> dict[str, str]:
    """The entries of the Secret with random values."""
    data: dict[str, str] = harness.object("Secret", "dps-router-credentials")["data"]
    return data


async def test_random_values_are_created_once(harness: OperatorHarness) -> None:
    first = credentials(harness)
    harness.restart()
    await harness.reconcile()
    assert credentials(harness) == first
    assert set(first) == ENTRIES
    for name in ("qwen-redis.password", "qwen-gateway.admin-token"):
        assert len(base64.b64decode(first[name])) >= 32


async def test_gateways_and_the_calibration_have_the_token_of_the_admin_port() -> None:
    harness = OperatorHarness({**SMALLEST, "routing": {"calibration": {"schedule": "0 3 * * *"}}})
    await harness.reconcile()
    pod = harness.object("Deployment", "qwen-gateway")["spec"]["template"]["spec"]
    (volume,) = (each for each in pod["volumes"] if each["name"] == "admin-token")
    (mount,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "admin-token")
    config = yaml.safe_load(harness.object("ConfigMap", "qwen-gateway")["data"]["config.yaml"])
    item = {"key": "qwen-gateway.admin-token", "path": "token"}
    assert volume["secret"] == {"secretName": "dps-router-credentials", "items": [item]}
    assert config["listen"]["adminTokenFile"] == f"{mount['mountPath']}/token"
    job = harness.object("CronJob", "qwen-calibration")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    source = {"secretKeyRef": {"name": "dps-router-credentials", "key": "qwen-gateway.admin-token"}}
    assert job["containers"][0]["env"] == [{"name": "DPS_ADMIN_TOKEN", "valueFrom": source}]


async def test_secret_of_the_prefix_cache_is_created_once_and_removed_with_the_common_cache() -> None:
    harness = OperatorHarness(PREFIX_CACHE)
    await harness.reconcile()
    first = credentials(harness)
    assert set(first) == ENTRIES | {"qwen-prefix-cache.secret"}
    harness.edit({**PREFIX_CACHE, "prefixCache": {**PREFIX_CACHE["prefixCache"], "mode": "Separate"}})
    await harness.reconcile()
    harness.rolled_out()
    await harness.reconcile()
    assert credentials(harness) == {name: first[name] for name in ENTRIES}
    assert harness.cluster.names("PersistentVolumeClaim") == set()


async def test_secret_and_claim_of_the_prefix_cache_are_kept_while_the_pools_cannot_share() -> None:
    harness = OperatorHarness(PREFIX_CACHE)
    await harness.reconcile()
    before = credentials(harness)
    harness.edit({**PREFIX_CACHE, "engine": {"version": "0.5.22"}})
    await harness.reconcile()
    assert harness.condition("PrefixCacheShared")["status"] == "False"
    assert credentials(harness) == before
    assert harness.cluster.names("PersistentVolumeClaim") == {"qwen-prefix-cache"}


async def test_replaced_secret_of_the_prefix_cache_restarts_the_engines() -> None:
    harness = OperatorHarness(PREFIX_CACHE)
    await harness.reconcile()
    before = harness.object("Deployment", "qwen-greedy")["spec"]["template"]["metadata"]["annotations"]
    del harness.cluster.objects["Secret", "serving", "dps-router-credentials"]
    await harness.reconcile()
    after = harness.object("Deployment", "qwen-greedy")["spec"]["template"]["metadata"]["annotations"]
    assert set(before) == set(after) == {"dpsrouter.io/prefix-cache-secret"}
    assert before != after


async def test_secret_of_that_name_that_the_operator_did_not_create_is_not_changed() -> None:
    harness = OperatorHarness(SMALLEST)
    metadata = {"name": "dps-router-credentials", "namespace": "serving"}
    foreign = harness.cluster.store({"apiVersion": "v1", "kind": "Secret", "metadata": metadata}, "kubectl")
    await harness.reconcile()
    assert harness.condition("SpecValid")["message"].startswith(
        "Secret dps-router-credentials, which the operator uses, exists and was not created by it; delete the Secret"
    )
    assert harness.object("Secret", "dps-router-credentials") == foreign


async def test_deleted_router_removes_its_values_from_the_secret_that_others_use(
    harness: OperatorHarness,
) -> None:
    own = credentials(harness)
    await release(harness.cluster, ("serving", "qwen"))
    assert credentials(harness) == own, "the Secret is garbage-collected with its last owner"
    other = {"metadata": {"ownerReferences": [OTHER]}, "data": {"other-redis.password": "eA=="}}
    await harness.cluster.strategic_merge(SECRET, "serving", "dps-router-credentials", other)
    del harness.cluster.objects["DPSRouter", *KEY]
    await harness.reconcile()
    assert credentials(harness) == other["data"]
    assert harness.object("Secret", "dps-router-credentials")["metadata"]["ownerReferences"] == [OTHER]


DELETED = nullcontext()


@pytest.mark.parametrize(
    ("status", "outcome"), [(404, DELETED), (409, DELETED), (500, pytest.raises(ClusterError))]
)
async def test_secret_that_is_deleted_meanwhile_needs_no_removal(
    harness: OperatorHarness, status: int, outcome: AbstractContextManager[Any]
) -> None:
    credentials(harness)["other-redis.password"] = "eA=="
    harness.cluster.fail["strategic_merge", "Secret"] = ClusterError("it has been deleted", status)
    with outcome:
        await release(harness.cluster, ("serving", "qwen"))
