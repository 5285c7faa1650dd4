"""The common prefix cache with backend Mooncake."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from dps_engines.pools import POOLS
from dps_operator.builders.children import children
from dps_operator.builders.engine import engine_deployment
from dps_operator.resources import Manifest
from dps_operator.status.conditions import conditions
from dps_operator.status.observed import Observed
from dps_testkit.operator.harness import OperatorHarness
from dps_testkit.operator.objects import replicas, workload
from dps_testkit.operator.routers import MOONCAKE, PREFIX_CACHE, SETTINGS, SMALLEST, router

EXTERNAL = {"segmentSize": "64Gi", "externalMaster": "mooncake.storage.svc:50051"}


def with_mooncake(mooncake: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """MOONCAKE with other settings of the backend, and other fields of the spec."""
    cache = {"mode": "Common", "backend": "Mooncake", "mooncake": mooncake}
    return {**MOONCAKE, "prefixCache": cache, **fields}


def made(spec: dict[str, Any], component: str) -> dict[str, Manifest]:
    """The objects of a component, by kind."""
    return {
        one["kind"]: one
        for one in children(router(spec), SETTINGS, "", "")
        if one["metadata"]["name"] == f"qwen-{component}"
    }


def engine(spec: dict[str, Any]) -> Manifest:
    """The container of the greedy engines."""
    template = engine_deployment(router(spec), "greedy", SETTINGS)["spec"]["template"]
    (container,) = template["spec"]["containers"]
    found: Manifest = container
    return found


def master_container(spec: dict[str, Any]) -> Manifest:
    """The container of the master."""
    (container,) = made(spec, "mooncake")["Deployment"]["spec"]["template"]["spec"]["containers"]
    found: Manifest = container
    return found


NO_MASTER: dict[str, dict[str, Any]] = {
    "external master": with_mooncake(EXTERNAL),
    "backend File": PREFIX_CACHE,
    "pools that cannot share": with_mooncake({"segmentSize": "1Gi"}, engine={"version": "0.5.22"}),
    "mode Separate": {**MOONCAKE, "prefixCache": {**MOONCAKE["prefixCache"], "mode": "Separate"}},
}


@pytest.mark.parametrize("spec", NO_MASTER.values(), ids=NO_MASTER.keys())
def test_master_is_deployed_only_for_engines_that_share_pages_with_a_managed_one(
    spec: dict[str, Any],
) -> None:
    assert made(spec, "mooncake") == {}


def test_engines_connect_to_the_external_master() -> None:
    line = engine(with_mooncake(EXTERNAL))["args"]
    settings = yaml.safe_load(line[line.index("--hicache-storage-backend-extra-config") + 1])
    assert settings["master_server_address"] == "mooncake.storage.svc:50051"


def test_engines_of_both_pools_have_the_same_settings() -> None:
    lines = [
        engine_deployment(router(MOONCAKE), pool, SETTINGS)["spec"]["template"]["spec"]["containers"][0][
            "args"
        ]
        for pool in POOLS
    ]
    settings = [line[line.index("--hicache-storage-backend-extra-config") + 1] for line in lines]
    assert settings[0] == settings[1]


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
    assert master_container(spec)["image"] == image


def test_only_rdma_requires_a_capability() -> None:
    without = engine({**SMALLEST, "engine": {"version": "0.5.23"}})["securityContext"]
    assert engine(with_mooncake({"segmentSize": "1Gi"}))["securityContext"] == without
    with_rdma = engine(with_mooncake({"segmentSize": "1Gi", "protocol": "RDMA"}))["securityContext"]
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
    assert engine(spec)["resources"]["requests"]["memory"] == expected


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


async def test_mooncake_needs_no_secret() -> None:
    harness = OperatorHarness(MOONCAKE)
    await harness.reconcile()
    entries = harness.object("Secret", "dps-router-credentials")["data"]
    assert not [name for name in entries if "prefix-cache" in name]


async def test_master_is_deleted_with_the_backend() -> None:
    harness = OperatorHarness(MOONCAKE)
    await harness.reconcile()
    assert "qwen-mooncake" in harness.cluster.names("Deployment") & harness.cluster.names("Service")
    harness.edit({**MOONCAKE, "prefixCache": {**MOONCAKE["prefixCache"], "mode": "Separate"}})
    for _ in range(2):
        await harness.reconcile()
        harness.rolled_out()
    await harness.reconcile()
    assert "qwen-mooncake" not in harness.cluster.names("Deployment") | harness.cluster.names("Service")


def observed(ready: int, failure: str = "") -> Observed:
    """Components that serve, with this number of ready masters. failure: why the master's pod cannot be created."""
    made = {name: workload(name, replicas()) for name in ("speculative", "greedy", "gateway", "redis")}
    made["redis"] = replace(made["redis"], kind="StatefulSet")
    made["mooncake"] = workload("mooncake", replicas(ready, failure=failure))
    return Observed({(one.kind, one.name): one for one in made.values()})


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        (0, ("False", "MasterNotReady", "True", "RollingOut")),
        (1, ("Unknown", "NotMeasured", "False", "Settled")),
    ],
)
def test_master_that_is_not_ready_is_reported_and_does_not_affect_ready(
    ready: int, expected: tuple[str, str, str, str]
) -> None:
    found = {one.type: one for one in conditions(router(MOONCAKE), observed(ready))}
    serving, progressing = found["PrefixCacheServing"], found["Progressing"]
    assert (serving.status, serving.reason, progressing.status, progressing.reason) == expected
    assert found["PrefixCacheShared"].status == "Unknown"
    assert found["Ready"].status == "True"


def test_master_whose_pod_is_forbidden_is_reported_with_the_cause() -> None:
    found = {one.type: one for one in conditions(router(MOONCAKE), observed(0, "exceeded quota"))}
    assert found["PrefixCacheServing"].message == (
        "the Mooncake master is not ready: pods cannot be created: exceeded quota; running engines serve but share no "
        "pages, and new engines cannot start"
    )
