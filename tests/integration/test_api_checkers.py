"""llm-comply and CompatCanary, which check APIs for their clients, fail no check only because of the gateway."""

import shutil
from pathlib import Path

import pytest

from dps_local.stack import MODEL
from dps_testkit.api_checkers import COMPATCANARY, FORMATS, comply, scan
from dps_testkit.processes import Engine, LocalProcesses

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


async def test_no_check_fails_through_the_gateway_that_passes_without_it(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        gateway = await processes.start_gateway([engines[0]], [engines[1]])
        for form in FORMATS:
            direct, routed = [await comply(url, MODEL, form) for url in (engines[0].url, gateway.url)]
            assert direct.keys() == routed.keys()
            passed = {name for name, status in direct.items() if status == "passed"}
            assert passed
            assert {name for name in passed if routed[name] != "passed"} == set()


@pytest.mark.skipif(shutil.which("npx") is None, reason="npx is needed to run CompatCanary")
async def test_compatcanary_finds_no_difference_between_the_gateway_and_an_engine(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        gateway = await processes.start_gateway([engines[0]], [engines[1]])
        direct, routed = [await scan(url, MODEL, tmp_path) for url in (engines[0].url, gateway.url)]
    if direct is None:
        pytest.skip(f"npx cannot run {COMPATCANARY}")
    assert "PASS" in direct.values()
    assert routed == direct
