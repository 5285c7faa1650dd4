"""llm-comply and CompatCanary, which check APIs for their clients, fail no check only because of the gateway."""

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from dps_local.stack import MODEL
from dps_testkit.processes import Engine, LocalProcesses

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

FORMATS = ("openai-chat", "open-responses", "anthropic")
COMPATCANARY = "compatcanary@0.2.2"


async def checked(url: str, form: str) -> dict[str, str]:
    """The status of each of llm-comply's checks: passed, failed or skipped."""
    command = [str(Path(sys.executable).with_name("llm-comply")), "run", "--base-url", f"{url}/v1"]
    command += ["--model", MODEL, "--format", form, "--api-key", "unused", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    results: list[dict[str, Any]] = json.loads(output)["results"]
    return {result["id"]: result["status"] for result in results}


async def test_no_check_fails_through_the_gateway_that_passes_without_it(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        gateway = await processes.start_gateway([engines[0]], [engines[1]])
        for form in FORMATS:
            direct, routed = await checked(engines[0].url, form), await checked(gateway.url, form)
            assert direct.keys() == routed.keys()
            passed = {name for name, status in direct.items() if status == "passed"}
            assert passed
            assert {name for name in passed if routed[name] != "passed"} == set()


async def scanned(url: str, folder: Path) -> dict[str, str]:
    """The result of each of CompatCanary's checks, PASS, WARN or FAIL. Skips the test if it cannot be installed."""
    command = ["npx", "--yes", COMPATCANARY, "scan", "--base-url", f"{url}/v1", "--model", MODEL]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    if b"CompatCanary" not in output:
        pytest.skip(f"npx cannot run {COMPATCANARY}: {errors.decode()[-200:]}")
    found = re.findall(r"^(PASS|WARN|FAIL)  (.+?)  ", output.decode(), re.MULTILINE)
    return {name: status for status, name in found}


@pytest.mark.skipif(shutil.which("npx") is None, reason="npx is needed to run CompatCanary")
async def test_compatcanary_finds_no_difference_between_the_gateway_and_an_engine(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        gateway = await processes.start_gateway([engines[0]], [engines[1]])
        direct, routed = await scanned(engines[0].url, tmp_path), await scanned(gateway.url, tmp_path)
    assert "PASS" in direct.values()
    assert routed == direct
