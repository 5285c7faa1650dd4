"""Starts gateways whose engines all have a fixed answer."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from dps_gateway.api.public import public_app
from dps_gateway.config import parse_config
from dps_gateway.runtime import Runtime
from dps_local.assets import bundled_tokenizer
from dps_testkit.tokenizers import shared_tokenizer
from tests.gateway.dispatch.gateway_with_pools import FixedStatusEngine, GatewayWithPools, Start


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def started(
            speculative: list[FixedStatusEngine],
            greedy: list[FixedStatusEngine],
            timeouts: str = "{}",
            policy: str = "DeltaPrefill",
            limits: str = "{}",
            common_prefix_cache: bool = False,
        ) -> GatewayWithPools:
            urls: list[list[str]] = []
            for pool in (speculative, greedy):
                urls.append([])
                for engine in pool:
                    app = web.Application()
                    app.router.add_post("/{path:.*}", engine.handle)
                    server = await stack.enter_async_context(TestServer(app))
                    urls[-1].append(str(server.make_url("")).rstrip("/"))
            config = parse_config(
                f"model: {{name: m, tokenizer: {bundled_tokenizer()}}}\n"
                f"pools: {{speculative: {{endpoints: {urls[0]}}}, greedy: {{endpoints: {urls[1]}}}}}\n"
                f"routing: {{policy: {policy}, thresholdTokens: null, "
                f"commonPrefixCache: {str(common_prefix_cache).lower()}}}\n"
                f"timeouts: {timeouts}\nlimits: {limits}",
                source="test",
                environment={},
            )
            runtime = Runtime(config, shared_tokenizer(config.model.tokenizer))
            stack.push_async_callback(runtime.close)
            client = await stack.enter_async_context(TestClient(TestServer(public_app(runtime))))
            return GatewayWithPools(runtime, client, [*speculative, *greedy])

        yield started
