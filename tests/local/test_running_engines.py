"""Engines that run already are asked what they serve."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_local.assets import bundled_tokenizer
from dps_local.processes import free_ports
from dps_local.running_engines import GivenError, Served, served

HERE = str(bundled_tokenizer())
StartEngine = Callable[..., Awaitable[str]]


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[StartEngine]:
    """Starts a server that says of itself what the test wants; its URL."""
    servers: list[TestServer] = []

    async def start(models: Any, information: Any = None, status: int = 200) -> str:
        async def tell_models(_: web.Request) -> web.Response:
            return web.json_response(models, status=status)

        async def tell_information(_: web.Request) -> web.Response:
            return web.json_response(information, status=404 if information is None else 200)

        app = web.Application()
        app.add_routes([web.get("/v1/models", tell_models), web.get("/server_info", tell_information)])
        server = TestServer(app)
        await server.start_server()
        servers.append(server)
        return str(server.make_url("")).rstrip("/")

    yield start
    for server in servers:
        await server.close()


def models(name: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name}]}


async def test_model_and_tokenizer_are_what_the_engines_tell(engine: StartEngine) -> None:
    url = await engine(models("m"), {"tokenizer_path": HERE})
    assert await served({"speculative": url, "greedy": url}) == Served("m", HERE)


async def test_a_tokenizer_that_one_engine_has_here_is_enough(engine: StartEngine) -> None:
    away = await engine(models("m"), {"tokenizer_path": "/models/away"})
    here = await engine(models("m"), {"tokenizer_path": HERE})
    assert await served({"speculative": away, "greedy": here}) == Served("m", HERE)


async def test_what_the_user_says_takes_the_place_of_it(engine: StartEngine) -> None:
    first, second = await engine(models("a")), await engine(models("b"))
    urls: dict[Any, str] = {"speculative": first, "greedy": second}
    assert await served(urls, "c", "/tokenizer") == Served("c", "/tokenizer")


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "no tokenizer told": ((models("m"),), "the engines name no tokenizer; pass --tokenizer, a folder"),
    "a folder that is not here": (
        (models("m"), {"tokenizer_path": "/models/away"}),
        "the engines' tokenizer '/models/away' is not on this machine; pass --tokenizer",
    ),
    "a hub id that is not cached": (
        (models("m"), {"tokenizer_path": "nobody/nothing"}),
        "the engines' tokenizer 'nobody/nothing' is not on this machine; pass --tokenizer",
    ),
    "a key is asked for": ((models("m"), None, 401), "answers /v1/models with status 401"),
    "not an OpenAI-compatible server": (({"hello": 1},), "does not answer as an OpenAI-compatible server"),
    "no object at all": (([],), "does not answer as an OpenAI-compatible server"),
}


@pytest.mark.parametrize(("told", "message"), REFUSED.values(), ids=REFUSED.keys())
async def test_an_engine_that_cannot_be_used_is_told(
    engine: StartEngine, told: tuple[Any, ...], message: str
) -> None:
    url = await engine(*told)
    with pytest.raises(GivenError) as refused:
        await served({"speculative": url, "greedy": url})
    assert message in str(refused.value)


async def test_engines_of_different_models_are_refused(engine: StartEngine) -> None:
    first, second = await engine(models("a")), await engine(models("b"))
    with pytest.raises(GivenError, match=r"different models \(speculative: a, greedy: b\); .* --model"):
        await served({"speculative": first, "greedy": second})


async def test_an_engine_that_does_not_answer_is_named(engine: StartEngine) -> None:
    url = await engine(models("m"), {"tokenizer_path": HERE})
    (port,) = free_ports(1)
    with pytest.raises(GivenError, match=f"the greedy engine at http://127.0.0.1:{port} does not answer: .+"):
        await served({"speculative": url, "greedy": f"http://127.0.0.1:{port}"})
