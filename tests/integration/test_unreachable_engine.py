"""An unreachable engine: connections to it hang instead of being refused."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dps_local.processes import Child
from dps_testkit.data_plane import CHAT, chat, posted
from dps_testkit.processes import Engine, Gateway, LocalProcesses

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


@pytest.fixture
def unreachable() -> Iterator[Engine]:
    """An address where connections hang, because the listen backlog is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        address = f"http://127.0.0.1:{server.getsockname()[1]}"

        async def never() -> bool:
            return False

        yield Engine(Child("unreachable", [], Path(), never), address)


async def test_only_the_first_request_waits_for_the_connect_timeout(
    engines: tuple[Engine, Engine], unreachable: Engine, tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        # The first health check is still in progress when the requests arrive.
        timeouts = {"connectSeconds": 0.5, "healthIntervalSeconds": 600}
        gateway = await processes.start_gateway([unreachable], [engines[1]], {"timeouts": timeouts})

        assert await reason(gateway) == "failover"
        assert [replica["ready"] for replica in await replicas(gateway)] == [False]
        assert await reason(gateway) == "failover"
        assert await gateway.metric("dps_upstream_failures_total", kind="connect") == 1


async def reason(gateway: Gateway) -> str:
    async with posted(gateway.url + CHAT, chat()) as response:
        assert response.status == 200
        return response.headers["x-dps-reason"]


async def replicas(gateway: Gateway) -> list[dict[str, object]]:
    document: dict[str, dict[str, list[dict[str, object]]]] = await gateway.document("/pools")
    return document["speculative"]["replicas"]
