"""The Secret with the random values of the DPSRouters of a namespace."""

import base64

from dps_operator.api import API_VERSION, KIND
from dps_operator.credentials import forget_router
from dps_operator.objects import SECRET
from dps_testkit.operator.routers import SMALLEST
from tests.operator.harness import KEY, OperatorHarness

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
    values = {name: base64.b64decode(value).decode() for name, value in first.items()}
    password = values["qwen-redis.password"]
    assert values["qwen-redis.auth.conf"] == f"requirepass {password}\n"
    assert values["qwen-redis.url"] == f"redis://:{password}@qwen-redis.serving.svc:6379/0"


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
    await forget_router(harness.cluster, ("serving", "qwen"))
    assert credentials(harness) == own, "the Secret is garbage-collected with its last owner"
    other = {"metadata": {"ownerReferences": [OTHER]}, "data": {"other-redis.password": "eA=="}}
    await harness.cluster.strategic_merge(SECRET, "serving", "dps-router-credentials", other)
    del harness.cluster.objects["DPSRouter", *KEY]
    await harness.reconcile()
    assert credentials(harness) == other["data"]
    assert harness.object("Secret", "dps-router-credentials")["metadata"]["ownerReferences"] == [OTHER]
