"""The access log."""

import json
import subprocess
import sys
import time
from pathlib import Path

from dps_gateway.auth import Key, Keys, digest_of
from dps_gateway.telemetry.json_log import JsonLog
from dps_testkit.in_process_gateway import CHAT, USAGE, InProcessGateway, ScriptedEngine, chat


async def test_access_log_has_one_line_per_request_without_prompts_and_keys(
    gateway: InProcessGateway, engine: ScriptedEngine, tmp_path: Path
) -> None:
    path = tmp_path / "access.jsonl"
    gateway.runtime.access_log = JsonLog(path)
    gateway.runtime.keys = Keys([Key("team", digest_of("sk-secret"))])
    headers = {"Authorization": "Bearer sk-secret", "x-request-id": "r"}
    response, _ = await gateway.post(json=chat(user="private"), headers=headers)
    await gateway.send("GET", "/v1/models?secret=x", headers={"x-api-key": "sk-wrong", "x-request-id": "q"})
    await gateway.runtime.access_log.flush()
    content = path.read_text()
    entries = [json.loads(line) for line in content.splitlines()]
    for entry in entries:
        assert 0 <= entry.pop("seconds") <= time.time() - entry.pop("time") + 1
    chat_entry = {
        "request_id": "r",
        "tenant": "team",
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "outcome": "complete",
        "pool": response.headers["x-dps-pool"],
        "prompt_tokens": USAGE["prompt_tokens"],
        "output_tokens": USAGE["completion_tokens"],
        "cached_tokens": None,
    }
    refused = dict.fromkeys(chat_entry) | {
        "request_id": "q",
        "tenant": "",
        "method": "GET",
        "route": "/v1/*",
        "status": 401,
        "outcome": "failed",
    }
    assert entries == [chat_entry, refused]
    assert not any(word in content for word in ("private", "sk-", "secret", digest_of("sk-secret").hex()[:8]))


def test_access_log_can_be_standard_output() -> None:
    program = (
        "import asyncio, pathlib; from dps_gateway.telemetry.json_log import JsonLog;"
        "log = JsonLog(pathlib.Path('/dev/stdout'), max_file_bytes=1); log.add({'a': 1}); asyncio.run(log.flush())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ('{"a":1}\n', "")
