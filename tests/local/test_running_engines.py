"""Detection of the model and tokenizer that running engines serve."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_local.assets import bundled_tokenizer
from dps_local.processes import free_ports
from dps_local.running_engines import RunningEngineError, ServedModel, served_model

TOKENIZER = str(bundled_tokenizer())
StartEngine = Callable[..., Awaitable[str]]


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[StartEngine]:
    """Starts a server with the given responses and returns its URL."""
    servers: list[TestServer] = []

    async def start(models: Any, server_info: Any = None, status: int = 200) -> str:
        async def get_models(_: web.Request) -> web.Response:
            return web.json_response(models, status=status)

        async def get_server_info(_: web.Request) -> web.Response:
            return web.json_response(server_info, status=404 if server_info is None else 200)

        app = web.Application()
        app.add_routes([web.get("/v1/models", get_models), web.get("/server_info", get_server_info)])
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return str(server.make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


def models(name: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name}]}


async def test_tokenizer_of_either_engine_is_used_if_it_is_on_this_machine(engine: StartEngine) -> None:
    remote = await engine(models("m"), {"tokenizer_path": "/models/remote"})
    local = await engine(models("m"), {"tokenizer_path": TOKENIZER})
    assert await served_model({"speculative": remote, "greedy": local}) == ServedModel("m", TOKENIZER)


async def test_options_override_what_the_engines_report(engine: StartEngine) -> None:
    first, second = await engine(models("a")), await engine(models("b"))
    urls: dict[Any, str] = {"speculative": first, "greedy": second}
    assert await served_model(urls, "c", "/tokenizer") == ServedModel("c", "/tokenizer")


UNUSABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "no tokenizer reported": (
        (models("m"),),
        "the engines do not report their tokenizer; pass --tokenizer, a folder",
    ),
    "folder not on this machine": (
        (models("m"), {"tokenizer_path": "/models/remote"}),
        "the engines' tokenizer '/models/remote' is not on this machine; pass --tokenizer",
    ),
    "API key required": ((models("m"), None, 401), "returned status 401 for /v1/models"),
    "not an OpenAI-compatible server": (({"hello": 1},), "is not an OpenAI-compatible server"),
}


@pytest.mark.parametrize(("responses", "message"), UNUSABLE.values(), ids=UNUSABLE.keys())
async def test_unusable_engine_is_an_error(
    engine: StartEngine, responses: tuple[Any, ...], message: str
) -> None:
    url = await engine(*responses)
    with pytest.raises(RunningEngineError) as caught:
        await served_model({"speculative": url, "greedy": url})
    assert message in str(caught.value)


async def test_engines_with_different_models_are_an_error(engine: StartEngine) -> None:
    first, second = await engine(models("a")), await engine(models("b"))
    message = r"different models \(speculative: a, greedy: b\); .* --model"
    with pytest.raises(RunningEngineError, match=message):
        await served_model({"speculative": first, "greedy": second})


async def test_unreachable_engine_is_an_error(engine: StartEngine) -> None:
    url = await engine(models("m"), {"tokenizer_path": TOKENIZER})
    (port,) = free_ports(1)
    message = f"the greedy engine at http://127.0.0.1:{port} is unreachable: .+"
    with pytest.raises(RunningEngineError, match=message):
        await served_model({"speculative": url, "greedy": f"http://127.0.0.1:{port}"})
