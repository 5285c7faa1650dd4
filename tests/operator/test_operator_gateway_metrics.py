"""Reading the gateways' metrics, which a namespace's users can replace by anything."""

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_operator.autoscale import Activity, activities
from dps_operator.cache_health import counters
from dps_operator.errors import GatewaysUnreachableError
from dps_operator.metrics import MAX_BODY_BYTES, MetricsReader

UNREADABLE = "the metrics of the gateway at 127.0.0.1 cannot be read"


async def read(parse: Callable[[str], Any], **answer: Any) -> dict[str, Any]:
    """What is read from a gateway that answers /metrics with a response of these arguments."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(**answer)

    async def elsewhere(_: web.Request) -> web.Response:
        return web.Response(text="")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/elsewhere", elsewhere)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        assert server.port is not None
        return await MetricsReader(session, server.port).gateways(["127.0.0.1"], parse)


async def test_activity_is_read_by_the_address_of_the_gateway() -> None:
    assert await read(activities, text='dps_in_flight{pool="greedy"} 5\n') == {
        "127.0.0.1": {"speculative": Activity(), "greedy": Activity(present=5)}
    }


async def test_gateways_that_do_not_answer_are_unreachable() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(GatewaysUnreachableError, match="no gateway is ready"):
            await MetricsReader(session).gateways([], activities)
        with pytest.raises(
            GatewaysUnreachableError, match="port 1 of a gateway does not answer the operator"
        ):
            await MetricsReader(session, 1).gateways(["127.0.0.1"], activities)


REJECTED: dict[str, tuple[dict[str, Any], Callable[[str], object], str]] = {
    "text": ({"body": b"hello world"}, activities, UNREADABLE),
    "html": ({"body": b"<html> <body>"}, activities, UNREADABLE),
    "cut": ({"body": b'{pool="greedy"'}, activities, UNREADABLE),
    "bytes": ({"body": b"\xff 1"}, activities, UNREADABLE),
    "prompt tokens without a pool": (
        {"text": 'dps_prompt_tokens_by_source_total{x="y"} 1\n'},
        counters,
        UNREADABLE,
    ),
    "too many": (
        {"text": "#\n" * (MAX_BODY_BYTES // 2) + "#"},
        str,
        f"{UNREADABLE}: they are larger than 8 MiB",
    ),
    "redirect": ({"status": 302, "headers": {"Location": "/elsewhere"}}, str, "does not answer the operator"),
}


@pytest.mark.parametrize(("answer", "parse", "message"), REJECTED.values(), ids=REJECTED.keys())
async def test_gateways_with_other_metrics_count_as_unreachable(
    answer: dict[str, Any], parse: Callable[[str], object], message: str
) -> None:
    with pytest.raises(GatewaysUnreachableError, match=message):
        await read(parse, **answer)
