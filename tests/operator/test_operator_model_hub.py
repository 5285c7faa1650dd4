"""Reading the configurations of models from a Hub, whose contents the users of a cluster do not control."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from dps_engines.models import ModelFacts
from dps_operator.errors import UnreadableModelError
from dps_operator.model_hub import MAX_BYTES, RETRY_SECONDS, ModelHub
from dps_operator.model_sizes import HubModel

MODEL = HubModel("org/model")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 10,
    "tie_word_embeddings": False,
}
SIZE = ModelFacts(parameters=1352, layers=2, heads=4, kv_heads=2, intermediate_size=16, head_size=2)


class Hub:
    """A Hub that serves one file, and records the paths of all requests."""

    def __init__(self, answer: web.Response | None = None) -> None:
        self.answer = answer
        self.requests: list[str] = []

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request.raw_path)
        if request.path.startswith("/moved/"):
            return web.json_response(CONFIG)
        if self.answer is None:
            return web.json_response(CONFIG)
        # A response object can be sent only once.
        return web.Response(status=self.answer.status, headers=self.answer.headers, body=self.answer.body)

    @asynccontextmanager
    async def started(self) -> AsyncIterator["tuple[ModelHub, Clock, str]"]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self.serve)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            clock, endpoint = Clock(), str(server.make_url("")).rstrip("/")
            yield ModelHub(session, endpoint + "/", clock), clock, endpoint


class Clock:
    """A monotonic clock that a test advances."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


PATHS = {
    "default branch": (MODEL, "/org/model/resolve/main/config.json"),
    "revision": (HubModel("org/model", "v1.0"), "/org/model/resolve/v1.0/config.json"),
    "revision with a slash": (
        HubModel("org/model", "refs/pr/1"),
        "/org/model/resolve/refs%2Fpr%2F1/config.json",
    ),
    "revision that leaves the folder": (
        HubModel("org/model", "../../../x?y#z"),
        "/org/model/resolve/..%2F..%2F..%2Fx%3Fy%23z/config.json",
    ),
    "model without an organisation": (HubModel("gpt2"), "/gpt2/resolve/main/config.json"),
}


@pytest.mark.parametrize(("model", "path"), PATHS.values(), ids=PATHS.keys())
async def test_configuration_is_requested_once(model: HubModel, path: str) -> None:
    served = Hub()
    async with served.started() as (hub, _, _):
        assert [await hub.size(model), await hub.size(model)] == [SIZE, SIZE]
    assert served.requests == [path]


async def test_redirect_is_followed() -> None:
    served = Hub(web.Response(status=307, headers={"Location": "/moved/config.json"}))
    async with served.started() as (hub, _, _):
        assert await hub.size(MODEL) == SIZE


URL = "/org/model/resolve/main/config.json"
UNREADABLE: dict[str, tuple[web.Response, str]] = {
    "missing": (web.Response(status=404), f"HUB{URL} returned status 404"),
    "gated": (web.Response(status=401), f"HUB{URL} returned status 401"),
    "not JSON": (web.Response(text="<html>"), f"HUB{URL} is not JSON of at most 1 MiB"),
    "not text": (web.Response(body=b"\xff"), f"HUB{URL} is not JSON of at most 1 MiB"),
    "too large": (web.Response(text='"' + "x" * MAX_BYTES + '"'), f"HUB{URL} is not JSON of at most 1 MiB"),
    "deeply nested": (web.Response(text="[" * 100_000), f"HUB{URL} is not JSON of at most 1 MiB"),
    "a list": (web.json_response([1]), f"HUB{URL} is not a JSON object"),
    "quantized": (
        web.json_response({**CONFIG, "quantization_config": {}}),
        "its weights are quantized",
    ),
    "redirected without end": (
        web.Response(status=307, headers={"Location": URL}),
        "HUB does not answer the operator",
    ),
}


@pytest.mark.parametrize(("answer", "message"), UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_failure_is_cached_for_a_while(answer: web.Response, message: str) -> None:
    served = Hub(answer)
    async with served.started() as (hub, clock, endpoint):
        for _ in range(2):
            with pytest.raises(UnreadableModelError) as failed:
                await hub.size(MODEL)
            assert str(failed.value) == message.replace("HUB", endpoint)
        attempts = len(served.requests)
        served.answer = None
        clock.seconds += RETRY_SECONDS - 1
        with pytest.raises(UnreadableModelError):
            await hub.size(MODEL)
        assert len(served.requests) == attempts
        clock.seconds += 1
        assert await hub.size(MODEL) == SIZE


async def test_unreachable_hub_is_not_connected_to_for_each_model() -> None:
    clock = Clock()
    endpoint = f"http://127.0.0.1:{unused_port()}"
    async with aiohttp.ClientSession() as session:
        hub = ModelHub(session, endpoint, clock)
        for model in (MODEL, HubModel("org/other")):
            with pytest.raises(UnreadableModelError) as failed:
                await hub.size(model)
            assert str(failed.value) == f"{endpoint} does not answer the operator"
        served = Hub()
        app = web.Application()
        app.router.add_get("/{path:.*}", served.serve)
        async with TestServer(app, port=int(endpoint.rpartition(":")[2])):
            with pytest.raises(UnreadableModelError):
                await hub.size(HubModel("org/third"))
            assert served.requests == []
            clock.seconds += RETRY_SECONDS
            assert await hub.size(HubModel("org/third")) == SIZE
