"""llm-comply, which checks APIs against their published descriptions, fails no check only because of the gateway."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dps_local.stack import MODEL
from dps_testkit.processes import Engine, LocalProcesses

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

FORMATS = ("openai-chat", "open-responses", "anthropic")


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
