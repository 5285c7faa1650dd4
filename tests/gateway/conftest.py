"""A gateway whose engines do not answer."""

from collections.abc import AsyncIterator

import pytest

from dps_gateway.config import GatewayConfig
from dps_gateway.runtime import Runtime
from dps_testkit.tokenizers import shared_tokenizer


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    pool = {"endpoints": ["http://127.0.0.1:1"]}
    config = {"model": {"name": "m", "tokenizer": "x"}, "pools": {"speculative": pool, "greedy": pool}}
    runtime = Runtime(GatewayConfig.model_validate(config), shared_tokenizer())
    yield runtime
    await runtime.close()
