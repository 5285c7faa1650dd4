"""The access log."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

from dps_gateway.auth import Key, Keys, digest_of
from dps_gateway.telemetry.json_log import JsonLog
from dps_testkit.in_process_gateway import CHAT, USAGE, HeldAnswers, InProcessGateway, ScriptedEngine, chat


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
    }
    assert entries == [chat_entry, refused]
    assert not any(word in content for word in ("private", "sk-", "secret", digest_of("sk-secret").hex()[:8]))


async def test_access_log_names_the_tenant_of_a_request_that_exceeds_a_limit(
    gateway: InProcessGateway, engine: ScriptedEngine, tmp_path: Path
) -> None:
    path = tmp_path / "access.jsonl"
    gateway.runtime.access_log = JsonLog(path)
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), max_in_flight=1)])
    engine.answer = held = HeldAnswers()
    headers = {"Authorization": "Bearer sk"}
    first = asyncio.create_task(gateway.post(json=chat(), headers=headers))
    await held.received.wait()
    for _ in range(2):  # a refused request does not end the one that is in flight
        assert (await gateway.post(json=chat(), headers=headers))[0].status == 429
    held.release.set()
    assert (await first)[0].status == 200
    assert (await gateway.post(json=chat(), headers=headers))[0].status == 200
    await gateway.runtime.access_log.flush()
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["tenant"] for each in entries if each["status"] == 429] == ["team", "team"]


def test_access_log_can_be_standard_output() -> None:
    program = (
        "import asyncio, pathlib; from dps_gateway.telemetry.json_log import JsonLog;"
        "log = JsonLog(pathlib.Path('/dev/stdout'), max_file_bytes=1); log.add({'a': 1}); asyncio.run(log.flush())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ('{"a":1}\n', "")
