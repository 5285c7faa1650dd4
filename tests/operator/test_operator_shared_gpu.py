"""spec.placement SharedGPU: both engines on one GPU."""

import asyncio
import sys
import time
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_engines.pools import PoolName
from dps_operator.build import children
from dps_operator.build.engine import SCRIPT, engine_deployment
from dps_operator.errors import SpecError
from dps_operator.objects import COMPONENT_LABEL, Manifest
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router
from tests.operator.objects import engine_container, engine_pod

SHARED: dict[str, Any] = {**SMALLEST, "placement": "SharedGPU"}


def deployment(spec: dict[str, Any], pool: Any) -> Manifest:
    return engine_deployment(router(spec), pool, SETTINGS)


def test_the_memory_of_the_gpu_is_divided_between_the_engines() -> None:
    for pool, fraction in (("speculative", "0.70"), ("greedy", "0.64")):
        line = engine_container(SHARED, pool)["args"]
        assert line[line.index("--mem-fraction-static") + 1] == fraction
        assert line[line.index("--max-total-tokens") + 1] == "167936"
        assert engine_container({**SHARED, "nodePool": {"sharing": {"renamed": True}}}, pool)["args"] == line
        assert "--max-total-tokens" not in engine_container(SMALLEST, pool)["args"]


MPS: dict[str, Any] = {**SHARED, "nodePool": {"sharing": {"strategy": "MPS"}}}


def test_mps_gives_each_engine_half_of_the_memory() -> None:
    for pool, fraction, tokens in (("speculative", "0.68", "121856"), ("greedy", "0.68", "237568")):
        line = engine_container(MPS, pool)["args"]
        assert line[line.index("--mem-fraction-static") + 1] == fraction
        assert line[line.index("--max-total-tokens") + 1] == tokens
    with pytest.raises(SpecError, match=r"the engine needs .* but its part of the GPU has 20\.0 GiB"):
        engine_container({**MPS, "nodePool": {**MPS["nodePool"], "profile": "A100-40GB"}}, "greedy")


def test_with_mps_nothing_hides_the_shared_memory_that_the_device_plugin_mounts() -> None:
    def mounts(spec: dict[str, Any]) -> set[str]:
        return {mount["mountPath"] for mount in engine_container(spec)["volumeMounts"]}

    assert "/dev/shm" in mounts(SHARED)
    assert "/dev/shm" not in mounts(MPS)


def test_a_rollout_replaces_the_pod_unless_a_strategy_is_set() -> None:
    assert deployment(SHARED, "greedy")["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }
    for strategy in ({"type": "Recreate"}, {"maxSurge": 0, "maxUnavailable": 1}):
        own = {**SHARED, "pools": {**SMALLEST["pools"], "greedy": {"strategy": strategy}}}
        assert deployment(own, "greedy")["spec"]["strategy"]["type"] == strategy.get("type", "RollingUpdate")


@pytest.mark.parametrize("strategy", [{"maxSurge": 1}, {"maxSurge": "50%"}, {"maxUnavailable": 1}])
def test_a_rollout_that_needs_room_for_a_third_engine_is_refused(strategy: dict[str, Any]) -> None:
    own = {**SHARED, "pools": {**SMALLEST["pools"], "greedy": {"strategy": strategy}}}
    with pytest.raises(SpecError, match=r"pools\.greedy\.strategy\.type to Recreate, or maxSurge to 0"):
        deployment(own, "greedy")


def waiting_container(spec: dict[str, Any], pool: PoolName) -> Manifest | None:
    """The init container in which an engine waits for the other one."""
    containers = engine_pod(spec, pool).get("initContainers", [])
    found: Manifest | None = next((one for one in containers if one["name"] == "wait-for-neighbour"), None)
    return found


def test_only_the_speculative_engine_waits_for_the_other_one_on_its_gpu() -> None:
    container = waiting_container(SHARED, "speculative")
    assert container is not None
    assert container["image"] == "lmsysorg/sglang:v0.5.23"
    assert container["command"][3:] == ["http://qwen-greedy.serving.svc:30000/health", "1800"]
    assert waiting_container(SHARED, "greedy") is None
    assert waiting_container(SMALLEST, "speculative") is None


def test_engine_that_starts_second_waits_as_long_as_the_first_one_may_take_to_load() -> None:
    slow = {"spec": {"containers": [{"name": "engine", "startupProbe": {"failureThreshold": 360}}]}}
    spec = {**SHARED, "pools": {**SHARED["pools"], "greedy": {"podTemplate": slow}}}
    container = waiting_container(spec, "speculative")
    assert container is not None
    assert container["command"][-1] == "3600"
    assert deployment(spec, "speculative")["spec"]["progressDeadlineSeconds"] == 3600 + 1800 + 600


def test_network_policy_lets_the_waiting_engine_reach_the_other_one() -> None:
    def clients(spec: dict[str, Any], pool: PoolName) -> set[str]:
        """The components that may connect to the engines of a pool."""
        (policy,) = (
            one["spec"]
            for one in children(router({**spec, "networkPolicy": {}}), SETTINGS, "")
            if (one["kind"], one["metadata"]["name"]) == ("NetworkPolicy", f"qwen-{pool}")
        )
        (rule,) = policy["ingress"]
        return {one["podSelector"]["matchLabels"][COMPONENT_LABEL] for one in rule["from"]}

    assert clients(SHARED, "greedy") == {"gateway", "speculative"}
    assert clients(SHARED, "speculative") == {"gateway"}
    assert clients(SMALLEST, "greedy") == {"gateway"}


async def wait(port: int, seconds: float) -> tuple[int | None, float]:
    """Run the script of the waiting container; returns its exit code and how long it ran, in seconds."""
    started = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SCRIPT, f"http://127.0.0.1:{port}/health", str(seconds)
    )
    return await process.wait(), time.monotonic() - started


async def test_container_waits_until_the_other_engine_answers() -> None:
    answers = [503, 200]

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=answers.pop(0))

    app = web.Application()
    app.router.add_get("/health", health)
    async with TestServer(app) as server:
        assert server.port is not None
        code, _ = await wait(server.port, 30)
    assert (code, answers) == (0, [])


async def test_container_does_not_wait_for_longer_than_the_other_engine_may_take() -> None:
    async with TestServer(web.Application()) as server:
        assert server.port is not None
        code, seconds = await wait(server.port, 1)
    assert code == 0
    assert seconds >= 1
