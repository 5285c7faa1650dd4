"""Module-scoped engines, and a gateway with slow engines."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dps_testkit.plane import MAX_BODY_BYTES, SLOW, Plane
from dps_testkit.processes import Engine, Site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Engine, Engine]]:
    """A speculative and a greedy engine. Tests that use them must set `loop_scope="module"`."""
    async with Site(tmp_path_factory.mktemp("engines")) as site:
        speculative, greedy = await site.engines("speculative", "greedy")
        yield speculative, greedy


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Plane]:
    async with Site(tmp_path_factory.mktemp("plane")) as site:
        speculative, greedy = await site.engines("speculative", "greedy", arguments=SLOW)
        gateway = await site.gateway(
            [speculative],
            [greedy],
            {
                "routing": {"policy": "AlwaysGreedy"},
                "limits": {"maxBodyBytes": MAX_BODY_BYTES, "maxInFlightPerReplica": 1, "maxQueued": 1},
            },
        )
        yield Plane(site, speculative, greedy, gateway)
