"""The session store: its options, and the separation of routers that share one."""

from typing import Any

import pytest
import yaml

from dps_gateway.config import GatewayConfig
from dps_operator.builders.children import children
from dps_operator.builders.gateway import gateway_deployment
from dps_operator.builders.gateway_config import gateway_config
from dps_operator.errors import SpecError
from dps_operator.resources import Manifest
from dps_testkit.operator.harness import OperatorHarness
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router

EXTERNAL = {"urlSecretRef": {"name": "sessions", "key": "url"}}


def redis_pod(**managed: Any) -> Manifest:
    made = children(router({**SMALLEST, "sessionStore": {"managed": managed}}), SETTINGS, "uid")
    (found,) = [one for one in made if one["kind"] == "StatefulSet"]
    result: Manifest = found["spec"]["template"]["spec"]
    return result


def test_managed_store_has_the_resources_placement_and_pull_secrets_of_the_spec() -> None:
    template = {"spec": {"nodeSelector": {"disk": "ssd"}, "imagePullSecrets": [{"name": "mirror"}]}}
    pod = redis_pod(image="valkey/valkey:8", resources={"limits": {"memory": "2Gi"}}, podTemplate=template)
    (container,) = pod["containers"]
    assert (pod["nodeSelector"], pod["imagePullSecrets"]) == ({"disk": "ssd"}, [{"name": "mirror"}])
    assert container["image"] == "valkey/valkey:8"
    assert container["resources"] == {
        "requests": {"cpu": "100m", "memory": "512Mi"},
        "limits": {"memory": "2Gi"},
    }


def max_memory(managed: dict[str, Any]) -> str:
    arguments = redis_pod(**managed)["containers"][0]["args"]
    found: str = arguments[arguments.index("--maxmemory") + 1]
    return found


@pytest.mark.parametrize(("limit", "data"), [(None, "384mb"), ("2Gi", "1536mb"), (1000000000, "715mb")])
def test_redis_uses_three_quarters_of_its_memory_limit_for_data(limit: Any, data: str) -> None:
    assert (
        max_memory({"size": "10Gi", **({"resources": {"limits": {"memory": limit}}} if limit else {})})
        == data
    )


@pytest.mark.parametrize(("size", "data"), [("1Gi", "512mb"), (2 * 10**9, "953mb"), ("1Mi", "1mb")])
def test_redis_uses_at_most_half_of_its_volume_for_data(size: Any, data: str) -> None:
    assert max_memory({"size": size, "resources": {"limits": {"memory": "4Gi"}}}) == data


def test_redis_writes_no_snapshots_beside_its_append_only_file() -> None:
    """Half of the volume is reserved for rewriting that file; a snapshot would need further space."""
    arguments = redis_pod()["containers"][0]["args"]
    assert arguments[arguments.index("--save") + 1] == ""


def test_name_of_more_than_46_characters_requires_an_external_redis() -> None:
    """The StatefulSet controller could not create the pod, because the value of one of its labels would be too long."""
    children(router(SMALLEST, "q" * 46), SETTINGS, "uid")
    with pytest.raises(
        SpecError, match="a managed Redis requires a DPSRouter whose name has at most 46 characters"
    ):
        children(router(SMALLEST, "q" * 47), SETTINGS, "uid")
    children(router({**SMALLEST, "sessionStore": EXTERNAL}, "q" * 50), SETTINGS, "uid")


def test_gateways_mount_the_authorities_of_an_external_redis() -> None:
    store = {**EXTERNAL, "caSecretRef": {"name": "redis-ca", "key": "tls.crt"}}
    made = gateway_deployment(router({**SMALLEST, "sessionStore": store}), SETTINGS, "s")
    pod = made["spec"]["template"]["spec"]
    assert pod["volumes"][-1] == {
        "name": "redis-ca",
        "secret": {"secretName": "redis-ca", "items": [{"key": "tls.crt", "path": "ca.crt"}]},
    }
    assert pod["containers"][0]["volumeMounts"][-1] == {
        "name": "redis-ca",
        "mountPath": "/etc/dps-redis",
        "readOnly": True,
    }


def test_routers_that_share_a_redis_have_separate_scopes() -> None:
    spec = {**SMALLEST, "sessionStore": EXTERNAL}
    configs = [gateway_config(router(spec, name)) for name in ("qwen", "other")]
    assert [config["session"]["scope"] for config in configs] == ["serving/qwen", "serving/other"]
    GatewayConfig.model_validate(configs[0])
    assert "scope" not in gateway_config(router(SMALLEST))["session"]


async def test_gateways_read_the_url_of_an_external_redis_from_a_file_whose_changes_they_notice() -> None:
    harness = OperatorHarness({**SMALLEST, "sessionStore": EXTERNAL})
    await harness.reconcile()
    spec = harness.object("Deployment", "qwen-gateway")["spec"]["template"]["spec"]
    config = yaml.safe_load(harness.object("ConfigMap", "qwen-gateway")["data"]["config.yaml"])
    assert config["session"]["redisUrlFile"] == "/etc/dps-redis-url/url"
    assert {
        "name": "redis-url",
        "secret": {"secretName": "sessions", "items": [{"key": "url", "path": "url"}], "optional": True},
    } in spec["volumes"]
    assert {"name": "redis-url", "mountPath": "/etc/dps-redis-url", "readOnly": True} in spec["containers"][
        0
    ]["volumeMounts"]
