"""The emulated server's API key and faults. Its other answers: test_emulated_contract."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ServerDisconnectedError
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.test_utils import TestClient, TestServer

from dps_local.assets import bundled_tokenizer
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.server import create_app
from dps_local.emulated_sglang.settings import EngineSettings
from dps_testkit.clock import VirtualClock

SETTINGS = EngineSettings(str(bundled_tokenizer()), served_model_name="m")
CHAT = "/v1/chat/completions"
HELLO = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 4,
    "ignore_eos": True,
}

Start = Callable[..., Awaitable[TestClient[Any, Any]]]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts.load(SETTINGS.tokenizer_path)


@pytest.fixture
async def start(prompts: Prompts) -> AsyncIterator[Start]:
    """Starts engines in virtual time."""
    async with AsyncExitStack() as stack:

        async def start(**changes: Any) -> TestClient[Any, Any]:
            app = create_app(replace(SETTINGS, **changes), prompts, VirtualClock())
            return await stack.enter_async_context(TestClient(TestServer(app)))

        yield start


async def test_api_key_is_required_except_for_probes_and_metrics(start: Start) -> None:
    client = await start(api_key="secret")
    paths = ("/v1/models", "/server_info", "/health", "/metrics")
    assert [(await client.get(path)).status for path in paths] == [401, 401, 200, 200]
    right, wrong = ({"Authorization": f"Bearer {key}"} for key in ("secret", "guess"))
    assert (await client.get("/v1/models", headers=right)).status == 200
    refused = await client.get("/v1/models", headers=wrong)
    assert (refused.status, await refused.json()) == (401, {"error": "Unauthorized"})


INFERENCE: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    "/v1/completions": {"model": "m", "prompt": "hello", "max_tokens": 4, "ignore_eos": True},
    "/v1/messages": {"model": "m", "messages": HELLO["messages"], "max_tokens": 4},
    "/v1/responses": {"model": "m", "input": "hello", "max_output_tokens": 4},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}},
}


@pytest.mark.parametrize("path", INFERENCE)
async def test_streams_of_every_inference_api_can_be_made_to_break_off(start: Start, path: str) -> None:
    client = await start()
    await client.post("/emulate", json={"disconnect_after_chunks": 2})
    answer = await client.post(path, json=INFERENCE[path] | {"stream": True})
    with pytest.raises((ClientPayloadError, ServerDisconnectedError, ConnectionResetError)):
        await answer.read()
