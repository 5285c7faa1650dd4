"""Sessions that change pools on every turn, on real SGLang servers whose common prefix cache is Mooncake over TCP."""

from pathlib import Path

import pytest

from dps_engines.sglang.prefix_cache import PAGE_TOKENS
from dps_testkit.processes import Site
from e2e.prefix_cache import mooncake
from e2e.prefix_cache.alternation import check, gateway, sessions
from e2e.prefix_cache.sessions import play
from e2e.prefix_cache.shared_servers import shared_servers
from e2e.real_sglang.local_sglang import tiny_model

OBSTACLE = mooncake.obstacle()
pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(OBSTACLE is not None, reason=OBSTACLE or ""),
]


async def test_alternating_sessions_equal_sessions_that_never_moved(tmp_path: Path) -> None:
    mooncake.install()
    async with (
        mooncake.mooncake_master(tmp_path),
        shared_servers(
            tmp_path,
            kinds=("greedy", "STANDALONE"),
            cache=mooncake.CACHE,
            environment=mooncake.ENVIRONMENT,
        ) as servers,
        Site(tmp_path, tiny_model()) as site,
    ):
        greedy, standalone = servers["greedy"], servers["STANDALONE"]
        router = await gateway(site, standalone, greedy)
        unmoved, moved = sessions("unmoved"), sessions("moved")
        await play(unmoved, f"{greedy.url}/v1", {"": greedy}, PAGE_TOKENS)
        await play(moved, f"{router.url}/v1", {"greedy": greedy, "speculative": standalone}, PAGE_TOKENS)
        check(moved, unmoved, PAGE_TOKENS)
