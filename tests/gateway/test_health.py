"""Health checks of engines, and checks whether they generate tokens."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest
from aiohttp import web

from dps_gateway.engine.sglang import SGLang
from dps_gateway.upstream import health
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.health import watch_configuration, watch_generation, watch_health, watch_load
from dps_gateway.upstream.replica import LATE_CHECKS_TO_FAIL
from dps_testkit.waiting import PATIENCE_SECONDS
from tests.gateway.engine_pool import LONG_SECONDS, SinglePool
from tests.gateway.open_files import no_free_files
from tests.gateway.servers import AskedEngine, serving


@pytest.mark.parametrize(
    ("statuses", "ready"),
    [
        pytest.param([None] * (LATE_CHECKS_TO_FAIL - 1), 1, id="few late answers"),
        pytest.param([None] * LATE_CHECKS_TO_FAIL, 0, id="late answers"),
        pytest.param(
            [None] * (LATE_CHECKS_TO_FAIL - 1) + [200, None], 1, id="late answers, but not in a row"
        ),
        pytest.param([503], 0, id="503"),
    ],
)
async def test_replica_is_unavailable_after_one_failed_health_check_or_several_late_ones(
    statuses: list[int | None], ready: int
) -> None:
    """A check has at least a second; `None` is no answer. The check after the given ones has none either."""
    asked = asyncio.Queue[asyncio.Future[int]]()

    async def answer(request: web.Request) -> web.Response:
        status = asyncio.get_running_loop().create_future()
        asked.put_nowait(status)
        return web.Response(status=await status)

    async with serving(answer, SGLang.health_path) as url:
        pool = SinglePool(url)
        task = asyncio.create_task(watch_health([pool], SGLang.health_path, lambda: 0.01))
        for status in statuses:
            check = await asked.get()
            if status is not None:
                check.set_result(status)
        await asked.get()
        assert len(pool.ready) == ready
        task.cancel()


async def test_check_that_the_gateway_cannot_send_says_nothing_about_the_replica() -> None:
    engine = AskedEngine()
    async with serving(engine.handle, SGLang.health_path) as url:
        pool = SinglePool(url)
        with no_free_files():
            task = asyncio.create_task(watch_health([pool], SGLang.health_path, lambda: 0.01))
            await asyncio.sleep(0.2)
            assert (engine.keys, len(pool.ready)) == ([], 1)
        await engine.asked()
        task.cancel()


PATH = "/asked"


@pytest.mark.parametrize(
    "watch",
    [
        pytest.param(lambda pool: watch_health([pool], PATH, lambda: 2 * LONG_SECONDS), id="health"),
        pytest.param(
            lambda pool: watch_generation([pool], PATH, lambda: 1.0, lambda: 0.0, 2 * LONG_SECONDS),
            id="generation",
        ),
        pytest.param(lambda pool: watch_load([pool], PATH, SGLang().load_of, lambda: True), id="load"),
        pytest.param(
            lambda pool: watch_configuration([pool], PATH, SGLang().configuration_of), id="configuration"
        ),
    ],
)
async def test_engine_is_asked_while_100_others_do_not_answer(
    watch: Callable[[EnginePool], Coroutine[None, None, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, an aiohttp session opens at most 100 connections."""
    for name in ("LOAD_TIMEOUT_SECONDS", "CONFIGURATION_TIMEOUT_SECONDS"):
        monkeypatch.setattr(health, name, 2 * LONG_SECONDS)  # so that no silent engine is given up
    asked = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asked.set()
        return web.json_response({})

    async with serving(answer, PATH) as url:
        with socket.create_server(("0.0.0.0", 0), backlog=128) as silent:
            port = silent.getsockname()[1]
            others = [f"http://127.0.0.{number}:{port}" for number in range(1, 101)]
            task = asyncio.create_task(watch(SinglePool(*others, url)))
            await asyncio.wait_for(asked.wait(), PATIENCE_SECONDS)
            task.cancel()


class WatchedEngine(AskedEngine):
    """An engine whose generation is checked after `silent_seconds` without a token."""

    silent_seconds = 0.0

    @property
    def ready(self) -> int:
        return len(self.pool.ready)

    async def watch(self) -> None:
        self.pool = SinglePool(self.url)
        path = SGLang.generation_path
        await watch_generation([self.pool], path, lambda: 0.01, lambda: self.silent_seconds, 0.5)


@pytest.fixture
async def watched() -> AsyncIterator[WatchedEngine]:
    engine = WatchedEngine()
    async with serving(engine.handle, SGLang.generation_path) as engine.url:
        task = asyncio.create_task(engine.watch())
        yield engine
        task.cancel()


@pytest.mark.parametrize("status", [503, None], ids=["503", "no answer"])
async def test_engine_that_generates_nothing_receives_no_requests_until_it_does(
    watched: WatchedEngine, status: int | None
) -> None:
    for watched.status, ready in ((status, 0), (200, 1)):
        await watched.asked()
        assert watched.ready == ready


async def test_engine_without_such_a_check_is_not_hung(watched: WatchedEngine) -> None:
    watched.status = 404
    await watched.asked()
    assert watched.ready == 1


async def test_engine_that_generates_is_not_checked(watched: WatchedEngine) -> None:
    await watched.asked()
    watched.silent_seconds = 3600.0
    await asyncio.sleep(0.05)
    before = len(watched.keys)
    await asyncio.sleep(0.1)
    assert len(watched.keys) == before
