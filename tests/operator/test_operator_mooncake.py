"""The Mooncake master of a common prefix cache, and what engines need to use it."""

from typing import Any

import pytest
import yaml

from dps_engines.pools import POOLS
from dps_operator.build import children
from dps_operator.objects import Manifest
from dps_testkit.operator.routers import MOONCAKE, SETTINGS, SMALLEST, router
from tests.operator.objects import engine_container

EXTERNAL = {"segmentSize": "64Gi", "externalMaster": "mooncake.storage.svc:50051"}


def with_mooncake(mooncake: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """MOONCAKE with other settings of the backend, and other fields of the spec."""
    cache = {"mode": "Common", "mooncake": mooncake}
    return {**MOONCAKE, "prefixCache": cache, **fields}


def made(spec: dict[str, Any], component: str) -> dict[str, Manifest]:
    """The objects of a component, by kind."""
    return {
        one["kind"]: one
        for one in children(router(spec), SETTINGS, "")
        if one["metadata"]["name"] == f"qwen-{component}"
    }


NO_MASTER: dict[str, dict[str, Any]] = {
    "external master": with_mooncake(EXTERNAL),
    "pools that cannot share": with_mooncake({"segmentSize": "1Gi"}, engine={"version": "0.5.24"}),
    "mode Separate": {**MOONCAKE, "prefixCache": {**MOONCAKE["prefixCache"], "mode": "Separate"}},
}


@pytest.mark.parametrize("spec", NO_MASTER.values(), ids=NO_MASTER.keys())
def test_master_is_deployed_only_for_engines_that_share_pages_with_a_managed_one(
    spec: dict[str, Any],
) -> None:
    assert made(spec, "mooncake") == {}


def test_engines_connect_to_the_external_master() -> None:
    line = engine_container(with_mooncake(EXTERNAL))["args"]
    settings = yaml.safe_load(line[line.index("--hicache-storage-backend-extra-config") + 1])
    assert settings["master_server_address"] == "mooncake.storage.svc:50051"


IMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "engine's": (MOONCAKE, "lmsysorg/sglang:v0.5.23"),
    "own engine image": (
        with_mooncake({"segmentSize": "1Gi"}, engine={"version": "0.5.23", "image": "mirror/sglang:own"}),
        "mirror/sglang:own",
    ),
    "own": (
        with_mooncake({"segmentSize": "1Gi", "master": {"image": "mirror/mooncake:1"}}),
        "mirror/mooncake:1",
    ),
}


@pytest.mark.parametrize(("spec", "image"), IMAGES.values(), ids=IMAGES.keys())
def test_master_uses_the_image_of_the_engines_unless_it_has_its_own(spec: dict[str, Any], image: str) -> None:
    (container,) = made(spec, "mooncake")["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == image


def test_only_rdma_requires_a_capability() -> None:
    without = engine_container({**SMALLEST, "engine": {"version": "0.5.23"}})["securityContext"]
    assert engine_container(with_mooncake({"segmentSize": "1Gi"}))["securityContext"] == without
    with_rdma = engine_container(with_mooncake({"segmentSize": "1Gi", "protocol": "RDMA"}))["securityContext"]
    assert with_rdma == {**without, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}


MEMORY: dict[str, tuple[dict[str, Any], str]] = {
    "one GPU": ({}, "34304Mi"),
    "two GPUs": ({"engine": {"version": "0.5.23", "tensorParallel": 2}}, "67072Mi"),
    "requested by the spec": (
        {"pools": {**SMALLEST["pools"], "greedy": {"resources": {"requests": {"memory": "200Gi"}}}}},
        "200Gi",
    ),
}


@pytest.mark.parametrize(("fields", "expected"), MEMORY.values(), ids=MEMORY.keys())
def test_segment_is_added_to_the_default_memory_request(fields: dict[str, Any], expected: str) -> None:
    spec = with_mooncake({"segmentSize": "1536Mi"}, **fields, nodePool={"profile": "None"})
    assert engine_container(spec)["resources"]["requests"]["memory"] == expected


def test_change_of_the_master_does_not_restart_the_engines() -> None:
    cache = {**MOONCAKE["prefixCache"]["mooncake"], "master": {"resources": {"limits": {"memory": "8Gi"}}}}
    assert made(with_mooncake(cache), "mooncake") != made(MOONCAKE, "mooncake")
    for pool in POOLS:
        assert made(with_mooncake(cache), pool) == made(MOONCAKE, pool)


MONITORED = {**MOONCAKE, "telemetry": {"serviceMonitor": {}}}
SCRAPED: dict[str, tuple[dict[str, Any], bool]] = {
    "managed master": (MONITORED, True),
    "external master": (with_mooncake(EXTERNAL, telemetry=MONITORED["telemetry"]), False),
}


@pytest.mark.parametrize(("spec", "scraped"), SCRAPED.values(), ids=SCRAPED.keys())
def test_service_monitor_selects_the_metrics_of_a_managed_master(spec: dict[str, Any], scraped: bool) -> None:
    monitor = made(spec, "metrics")["ServiceMonitor"]["spec"]
    (expression,) = monitor["selector"]["matchExpressions"]
    assert ("mooncake" in expression["values"]) == scraped
    if scraped:
        service = made(spec, "mooncake")["Service"]
        assert service["metadata"]["labels"][expression["key"]] == "mooncake"
        assert service["metadata"]["labels"].items() >= monitor["selector"]["matchLabels"].items()
        ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
        assert [ports[one["port"]] for one in monitor["endpoints"] if one["port"] in ports] == [9003]
