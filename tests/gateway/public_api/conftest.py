"""A gateway in front of a scripted engine."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from dps_gateway.api.public import public_app
from dps_gateway.app import server_log
from dps_gateway.config import GatewayConfig
from dps_gateway.runtime import Runtime
from dps_testkit.in_process_gateway import InProcessGateway, ScriptedEngine
from dps_testkit.tokenizers import shared_tokenizer


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def gateway(engine: ScriptedEngine) -> AsyncIterator[InProcessGateway]:
    app = web.Application(client_max_size=0)
    app.router.add_route("*", "/{path:.*}", engine.handle)
    port = unused_port()
    async with TestServer(app) as server, aiohttp.ClientSession() as client:
        pool = {"endpoints": [str(server.make_url(""))]}
        config = GatewayConfig.model_validate(
            {
                "model": {"name": "m", "tokenizer": "x"},
                "pools": {"speculative": pool, "greedy": pool},
                "limits": {"maxBodyBytes": 100_000},
            }
        )
        runtime = Runtime(config, shared_tokenizer())
        runner = web.AppRunner(
            public_app(runtime), handler_cancellation=True, access_log=None, logger=server_log()
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield InProcessGateway(runtime, port, client)
        await runner.cleanup()
        await runtime.close()
