"""Module-scoped engines, a gateway with an API key, and one with slow engines."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dps_testkit.data_plane import MAX_BODY_BYTES, SLOW, DataPlane
from dps_testkit.processes import Engine, LocalProcesses


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Engine, Engine]]:
    """A speculative and a greedy engine. Tests that use them must set `loop_scope="module"`."""
    async with LocalProcesses(tmp_path_factory.mktemp("engines")) as processes:
        speculative, greedy = await processes.start_engines("speculative", "greedy")
        yield speculative, greedy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def data_plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DataPlane]:
    async with LocalProcesses(tmp_path_factory.mktemp("data-plane")) as processes:
        speculative, greedy = await processes.start_engines("speculative", "greedy", arguments=SLOW)
        gateway = await processes.start_gateway(
            [speculative],
            [greedy],
            {
                "routing": {"policy": "AlwaysGreedy"},
                "limits": {"maxBodyBytes": MAX_BODY_BYTES, "maxInFlightPerReplica": 1, "maxQueued": 1},
            },
        )
        yield DataPlane(processes, speculative, greedy, gateway)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed_gateway(
    engines: tuple[Engine, Engine], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, str]]:
    """The URL of a gateway, and the only API key that it accepts."""
    folder, key = tmp_path_factory.mktemp("keyed"), "sk-test"
    (folder / "keys").write_text(f"one:{key}\n")
    async with LocalProcesses(folder) as processes:
        sections = {"auth": {"keysFile": str(folder / "keys")}}
        gateway = await processes.start_gateway([engines[0]], [engines[1]], sections)
        yield gateway.url, key
