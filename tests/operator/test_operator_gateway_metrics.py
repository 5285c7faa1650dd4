"""Reading the gateways' metrics, which a namespace's users can replace by anything."""

import threading
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_operator.errors import GatewaysUnreachableError
from dps_operator.gateway_metrics import GatewayMetrics
from dps_operator.gpu_budget.demand import GatewayDemand
from dps_operator.pod_metrics import LARGE_BODY_BYTES, MAX_BODY_BYTES
from dps_operator.prefix_cache.health import counters
from dps_operator.scale_to_zero.scaler import GatewayActivity

UNREADABLE = "the metrics of the gateway at 127.0.0.1 cannot be read"


def gateway(**answer: Any) -> TestServer:
    """A gateway that answers /metrics with a response of these arguments."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(**answer)

    async def elsewhere(_: web.Request) -> web.Response:
        return web.Response(text="")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/elsewhere", elsewhere)
    return TestServer(app)


@pytest.mark.parametrize(
    "body",
    [b"hello world", b"<html> <body>", b'{pool="greedy"', b"\xff 1"],
    ids=["text", "html", "cut", "bytes"],
)
async def test_gateways_whose_metrics_cannot_be_read_count_as_unreachable(body: bytes) -> None:
    async with gateway(body=body) as server, aiohttp.ClientSession() as session:
        assert server.port is not None
        metrics = GatewayMetrics(session, server.port)
        for reader in (GatewayDemand(metrics), GatewayActivity(metrics)):
            with pytest.raises(GatewaysUnreachableError, match=UNREADABLE):
                await reader.read(["127.0.0.1"])


@pytest.mark.parametrize("name", ["dps_fetchable_tokens_total", "dps_prompt_tokens_by_source_total"])
async def test_gateways_whose_metrics_lack_a_label_count_as_unreachable(name: str) -> None:
    async with (
        gateway(text=f'{name}{{x="y"}} 1\n') as server,
        aiohttp.ClientSession() as session,
    ):
        assert server.port is not None
        with pytest.raises(GatewaysUnreachableError, match=UNREADABLE):
            await GatewayMetrics(session, server.port).read(["127.0.0.1"], counters)


async def test_gateways_with_too_many_metrics_count_as_unreachable() -> None:
    async with (
        gateway(text="#\n" * (MAX_BODY_BYTES // 2) + "#") as server,
        aiohttp.ClientSession() as session,
    ):
        assert server.port is not None
        with pytest.raises(GatewaysUnreachableError, match=f"{UNREADABLE}: they are larger than 8 MiB"):
            await GatewayMetrics(session, server.port).read(["127.0.0.1"], str)


@pytest.mark.parametrize("large", [False, True])
async def test_large_metrics_are_parsed_outside_of_the_event_loop(large: bool) -> None:
    text = "#" * (LARGE_BODY_BYTES + large)
    async with gateway(text=text) as server, aiohttp.ClientSession() as session:
        assert server.port is not None
        metrics = GatewayMetrics(session, server.port)
        (thread,) = await metrics.read(["127.0.0.1"], lambda _: threading.get_ident())
    assert (thread != threading.get_ident()) is large


async def test_redirects_of_a_gateway_are_not_followed() -> None:
    async with (
        gateway(status=302, headers={"Location": "/elsewhere"}) as server,
        aiohttp.ClientSession() as session,
    ):
        assert server.port is not None
        with pytest.raises(GatewaysUnreachableError, match="does not answer the operator"):
            await GatewayMetrics(session, server.port).read(["127.0.0.1"], str)
