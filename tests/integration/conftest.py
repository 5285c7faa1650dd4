"""Engines that the tests of a module share."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.site import Engine, Site


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Engine, Engine]]:
    """A speculative and a greedy engine; tests that use them run with `loop_scope="module"`."""
    async with Site(tmp_path_factory.mktemp("engines")) as site:
        speculative, greedy = await site.engines("speculative", "greedy")
        yield speculative, greedy
