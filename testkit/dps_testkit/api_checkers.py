"""llm-comply and CompatCanary, which check for clients whether a server conforms to an API."""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

COMPATCANARY: Final = "compatcanary@0.2.2"

FORMATS: Final = ("openai-chat", "open-responses", "anthropic")
"""The names that llm-comply has for the APIs."""


async def comply(url: str, model: str, form: str) -> dict[str, str]:
    """The status of each of llm-comply's checks of one API: passed, failed or skipped."""
    command = [str(Path(sys.executable).with_name("llm-comply")), "run", "--base-url", f"{url}/v1"]
    command += ["--model", model, "--format", form, "--api-key", "unused", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    results: list[dict[str, Any]] = json.loads(output)["results"]
    return {result["id"]: result["status"] for result in results}


async def scan(url: str, model: str, folder: Path) -> dict[str, str] | None:
    """The result of each of CompatCanary's checks, PASS, WARN or FAIL. None if npx cannot install it."""
    command = ["npx", "--yes", COMPATCANARY, "scan", "--base-url", f"{url}/v1", "--model", model]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    if b"CompatCanary" not in output:
        return None
    found = re.findall(r"^(PASS|WARN|FAIL)  (.+?)  ", output.decode(), re.MULTILINE)
    return {name: status for status, name in found}
