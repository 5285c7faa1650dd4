"""KEDA scales a pool with `scaling: External` by the documented ScaledObject, on the metrics of a real gateway.

Run `e2e/keda/install` first. Pods are simulated; the engines of the gateway are local processes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import Operator
from dps_testkit.data_plane import CHAT, ENDLESS, SLOW, chat, posted
from dps_testkit.documents import blocks, run_by
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from dps_testkit.waiting import eventually, wait_until
from e2e.control_plane.objects import deployment, pods, ready
from e2e.keda.keda import INSTALLED, VERSION, keda
from e2e.metrics.prometheus import Prometheus, Target
from e2e.metrics.routers import labels
from e2e.node.commands import run_commands

pytest_plugins = ["e2e.cluster.fixtures"]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(not INSTALLED, reason=f"e2e/keda/install has not built KEDA {VERSION}"),
]

HERE = Path(__file__)
DOCUMENT = "docs/operating.md"
COOLDOWN_SECONDS = 5
SETTLED_SECONDS = 10
EXTERNAL = {"greedy": {"scaling": "External"}}


@dataclass(frozen=True)
class Traffic:
    """A gateway that sends all requests to one greedy engine, or to the speculative one while that is stopped."""

    gateway: Gateway
    greedy: Engine
    prometheus: Prometheus

    @asynccontextmanager
    async def in_flight(self, count: int) -> AsyncIterator[None]:
        """Requests that do not end before the block does."""
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            )
            held = [
                asyncio.create_task(http.post(self.gateway.url + CHAT, json=ENDLESS).__aenter__())
                for _ in range(count)
            ]
            try:
                yield
            finally:
                for request in held:
                    request.cancel()
                await asyncio.gather(*held, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scaler(installed: Kube, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[None]:
    async with keda(installed, tmp_path_factory.mktemp("keda")):
        yield


@pytest_asyncio.fixture(loop_scope="module")
async def traffic(tmp_path: Path) -> AsyncIterator[Traffic]:
    async with LocalProcesses(tmp_path) as processes:
        speculative, greedy = await processes.start_engines("speculative", "greedy", arguments=SLOW)
        routing = {"routing": {"policy": "AlwaysGreedy"}}
        gateway = await processes.start_gateway([speculative], [greedy], routing)
        async with Prometheus(tmp_path, [Target(gateway.admin, labels("llm", "qwen", "metrics"))]) as server:
            yield Traffic(gateway, greedy, server)


def documented(prometheus: Prometheus) -> Manifest:
    """The documented ScaledObject for this server, which reacts within seconds."""
    (text,) = (block.text for block in blocks(DOCUMENT) if "kind: ScaledObject" in block.text)
    manifest: dict[str, Any] = yaml.safe_load(text)
    del manifest["metadata"]["namespace"]
    manifest["spec"] |= {"pollingInterval": 1, "cooldownPeriod": COOLDOWN_SECONDS}
    (trigger,) = manifest["spec"]["triggers"]
    trigger["metadata"]["serverAddress"] = prometheus.url
    return manifest


def replicas(kube: Kube) -> int:
    found: int = deployment(kube, "greedy")["spec"]["replicas"]
    return found


async def has_replicas(kube: Kube, count: int) -> None:
    def check() -> None:
        assert replicas(kube) == count
        assert len(pods(kube, "greedy")) == count

    await asyncio.to_thread(eventually, check)


async def remains_unchanged(kube: Kube, operator: Operator) -> None:
    """Assert that neither the operator nor KEDA writes to the Deployment, nor the operator to any other object."""

    def state() -> tuple[str, int]:
        version: str = deployment(kube, "greedy")["metadata"]["resourceVersion"]
        return version, operator.writes()

    await asyncio.to_thread(kube.until, "qwen", Progressing="Settled")
    before = await asyncio.to_thread(state)
    await asyncio.sleep(SETTLED_SECONDS)
    assert await asyncio.to_thread(state) == before


@pytest_asyncio.fixture(loop_scope="module")
async def scaled(
    kube: Kube, scaler: None, shared_operator: Operator, traffic: Traffic
) -> AsyncIterator[Traffic]:
    """A DPSRouter whose greedy pool KEDA scales by this traffic."""
    await asyncio.to_thread(ready, kube, pools=EXTERNAL)
    await asyncio.to_thread(kube.apply, documented(traffic.prometheus))
    yield traffic
    # While KEDA runs, because it removes its finalizer.
    await asyncio.to_thread(kube.kubectl, "delete", "scaledobject", "qwen-greedy")


async def test_documented_scaled_object_scales_to_several_replicas_to_zero_and_back(
    kube: Kube, scaled: Traffic, shared_operator: Operator
) -> None:
    async with scaled.in_flight(40):
        await has_replicas(kube, 3)
        await remains_unchanged(kube, shared_operator)
    await has_replicas(kube, 0)
    await asyncio.to_thread(kube.until, "qwen", GreedyPoolReady="ScaledToZero")
    await remains_unchanged(kube, shared_operator)

    await scaled.greedy.child.stop()

    async def noticed() -> bool:
        return await scaled.gateway.metric("dps_ready_replicas", pool="greedy") == 0

    await wait_until(noticed, "the greedy engine is not ready")
    async with posted(scaled.gateway.url + CHAT, chat()) as response:
        assert (response.status, response.headers["x-dps-pool"]) == (200, "speculative")
    await has_replicas(kube, 1)
    await asyncio.to_thread(kube.until, "qwen", Ready="True")


async def test_pool_keeps_its_engines_while_prometheus_has_no_metrics(kube: Kube, scaled: Traffic) -> None:
    async with scaled.in_flight(40):
        await has_replicas(kube, 3)
        await scaled.gateway.child.stop()
    await asyncio.sleep(3 * COOLDOWN_SECONDS)
    assert await scaled.prometheus.query("dps_demand") == []
    await has_replicas(kube, 3)


async def test_documented_commands_suspend_a_router_although_a_trigger_is_active(
    kube: Kube, scaled: Traffic, shared_operator: Operator
) -> None:
    pause, resume = (block.text for block in run_by(HERE))
    async with scaled.in_flight(40):
        await has_replicas(kube, 3)
        await asyncio.to_thread(run_commands, pause, kube, 60.0)
        await has_replicas(kube, 0)
        await asyncio.to_thread(kube.until, "qwen", Ready="Suspended")
        await remains_unchanged(kube, shared_operator)
        await asyncio.to_thread(run_commands, resume, kube, 60.0)
        await has_replicas(kube, 3)
