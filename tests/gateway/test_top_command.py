"""`dps top`: its tables, its lines of JSON, and gateways that do not answer."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import BaseTestServer, TestServer

from dps_gateway.api.admin import admin_app
from dps_gateway.api.outcome import Outcome
from dps_gateway.commands.top import TOKEN, Gateway, Screen, main, rendered
from dps_gateway.runtime import Runtime
from dps_testkit.decision_records import decision_record


@pytest.fixture
async def admin(runtime: Runtime) -> AsyncIterator[BaseTestServer]:
    async with TestServer(admin_app(runtime)) as server:
        yield server


async def top(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dps_cli", "top", "--once", *map(str, arguments)]
    return await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "160", **environment},
    )


async def test_pools_and_newest_decisions_are_shown(runtime: Runtime, admin: BaseTestServer) -> None:
    runtime.recent.add(decision_record(client_session="[bold]mine", turn=3))
    runtime.recent.add(
        decision_record(outcome=Outcome.FAILED, status=503, session=None, attempt=None, time=1.0)
    )
    done = await top(admin.make_url(""))
    assert (done.returncode, done.stderr) == (0, "")
    first, _, *pools, _, newest, oldest = done.stdout.splitlines()
    assert "DeltaPrefill, τ = 128; redis: none; in progress: -" in first
    assert [line.split()[0] for line in pools] == ["speculative", "127.0.0.1:1", "greedy", "127.0.0.1:1"]
    assert newest.split()[1:] == [*"r", "1", "30", "30", *"--", "1.000", "failed", "503", "-", "-", "new"]
    assert oldest.split()[1:8] == ["[bold]mine", "3", "30", "30", "greedy", "over_threshold", "1.000"]


async def test_json_has_one_line_per_decision_of_the_session(runtime: Runtime, admin: BaseTestServer) -> None:
    runtime.admin_token = "token"
    for number in range(4):
        runtime.recent.add(decision_record(client_session=f"s{number % 2}", turn=number))
    done = await top(admin.make_url(""), "--json", "--session", "s1", **{TOKEN: "token"})
    assert [json.loads(line)["turn"] for line in done.stdout.splitlines()] == [1, 3]
    refused = await top(admin.make_url(""), "--json")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"/live answered 401; give the URL of the admin port, and {TOKEN}" in refused.stderr


def test_gateway_that_does_not_answer_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--once", "http://127.0.0.1:1"]) == 1
    assert "Cannot connect" in capsys.readouterr().err


def test_only_as_many_decisions_as_fit_are_shown() -> None:
    screen = Screen([Gateway("http://a")], None, as_json=False, once=False)
    screen.add([decision_record().document() for _ in range(50)])
    table: Any = rendered(screen, 80, 30)
    assert table.renderables[-1].row_count == 24
