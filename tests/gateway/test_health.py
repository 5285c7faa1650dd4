"""Health checks of engines, and checks whether they generate tokens."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_gateway.engine.sglang import SGLang
from dps_gateway.upstream import health
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.health import watch_configuration, watch_generation, watch_health, watch_load
from dps_gateway.upstream.replica import LATE_CHECKS_TO_FAIL
from dps_testkit.waiting import PATIENCE_SECONDS, wait_until
from tests.gateway.engine_pool import LONG_SECONDS, SinglePool
from tests.gateway.open_files import no_free_files


class Engine:
    """Answers checks with `status`, or not at all if it is None."""

    def __init__(self) -> None:
        self.status: int | None = 200
        self.checks = 0

    async def check(self, request: web.Request) -> web.Response:
        self.checks += 1
        if self.status is None:
            await asyncio.sleep(3600)
        return web.Response(status=self.status or 200)

    async def checked(self) -> None:
        """Wait for two checks, so that the first has been evaluated."""
        before = self.checks

        async def twice() -> bool:
            return self.checks >= before + 2

        await wait_until(twice, "two checks")


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

    app, pool = web.Application(), SinglePool()
    app.router.add_get(SGLang.health_path, answer)
    async with TestServer(app) as server:
        pool.set_endpoints([str(server.make_url("")).rstrip("/")])
        task = asyncio.create_task(watch_health([pool], SGLang.health_path, lambda: 0.01))
        for status in statuses:
            check = await asked.get()
            if status is not None:
                check.set_result(status)
        await asked.get()
        assert len(pool.ready) == ready
        task.cancel()


async def test_check_that_the_gateway_cannot_send_says_nothing_about_the_replica() -> None:
    engine, app, pool = Engine(), web.Application(), SinglePool()
    app.router.add_get(SGLang.health_path, engine.check)
    async with TestServer(app) as server:
        pool.set_endpoints([str(server.make_url("")).rstrip("/")])
        with no_free_files():
            task = asyncio.create_task(watch_health([pool], SGLang.health_path, lambda: 0.01))
            await asyncio.sleep(0.2)
            assert (engine.checks, len(pool.ready)) == (0, 1)
        await engine.checked()
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

    app, pool = web.Application(), SinglePool()
    app.router.add_get(PATH, answer)
    async with TestServer(app) as server:
        with socket.create_server(("0.0.0.0", 0), backlog=128) as silent:
            port = silent.getsockname()[1]
            others = [f"http://127.0.0.{number}:{port}" for number in range(1, 101)]
            pool.set_endpoints([*others, str(server.make_url("")).rstrip("/")])
            task = asyncio.create_task(watch(pool))
            await asyncio.wait_for(asked.wait(), PATIENCE_SECONDS)
            task.cancel()


class WatchedEngine:
    """An engine whose generation is checked after `silent_seconds` without a token."""

    def __init__(self, engine: Engine, pool: EnginePool) -> None:
        self.engine = engine
        self.pool = pool
        self.silent_seconds = 0.0

    @property
    def ready(self) -> int:
        return len(self.pool.ready)


@pytest.fixture
async def watched() -> AsyncIterator[WatchedEngine]:
    engine, pool = Engine(), SinglePool()
    app = web.Application()
    app.router.add_get(SGLang.generation_path, engine.check)
    async with TestServer(app) as server:
        pool.set_endpoints([str(server.make_url("")).rstrip("/")])
        result = WatchedEngine(engine, pool)
        task = asyncio.create_task(
            watch_generation([pool], SGLang.generation_path, lambda: 0.01, lambda: result.silent_seconds, 0.5)
        )
        yield result
        task.cancel()


@pytest.mark.parametrize("status", [503, None], ids=["503", "no answer"])
async def test_engine_that_generates_nothing_receives_no_requests_until_it_does(
    watched: WatchedEngine, status: int | None
) -> None:
    watched.engine.status = status
    await watched.engine.checked()
    assert watched.ready == 0
    watched.engine.status = 200
    await watched.engine.checked()
    assert watched.ready == 1


async def test_engine_without_such_a_check_is_not_hung(watched: WatchedEngine) -> None:
    watched.engine.status = 404
    await watched.engine.checked()
    assert watched.ready == 1


async def test_engine_that_generates_is_not_checked(watched: WatchedEngine) -> None:
    await watched.engine.checked()
    watched.silent_seconds = 3600.0
    await asyncio.sleep(0.05)
    before = watched.engine.checks
    await asyncio.sleep(0.1)
    assert watched.engine.checks == before
