"""llm-comply, which checks APIs for their clients, fails no check only because of the gateway."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from dps_local.stack import MODEL
from dps_testkit.processes import Engine, LocalProcesses

FORMATS: Final = ("openai-chat", "open-responses", "anthropic")
"""The names that llm-comply has for the APIs."""
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


async def comply(url: str, model: str, form: str) -> dict[str, str]:
    """The status of each of llm-comply's checks of one API: passed, failed or skipped."""
    command = [str(Path(sys.executable).with_name("llm-comply")), "run", "--base-url", f"{url}/v1"]
    command += ["--model", model, "--format", form, "--api-key", "unused", "--json"]
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
            direct, routed = [await comply(url, MODEL, form) for url in (engines[0].url, gateway.url)]
            assert direct.keys() == routed.keys()
            passed = {name for name, status in direct.items() if status == "passed"}
            assert passed
            assert {name for name in passed if routed[name] != "passed"} == set()
