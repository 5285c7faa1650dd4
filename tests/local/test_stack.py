"""The local stack: Redis, emulated engines and two gateways, one of which is killed and restarted."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import yaml

from dps_engines.launch import EngineError
from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.oracle import expected_by_session
from dps_lab.replay.records import TurnRecord
from dps_lab.replay.report import compare
from dps_lab.replay.run import replay
from dps_lab.workload.assets import bundled_sessions
from dps_lab.workload.sessions import load_sessions
from dps_local.assets import bundled_tokenizer
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.processes import ChildError
from dps_local.sglang import SGLangOptions
from dps_local.stack import LocalStack, StackOptions, until_signal

OPTIONS = StackOptions(tokenizer=bundled_tokenizer(), gateways=2, threshold_tokens=64, speed=50.0)


@pytest.mark.timeout(300)
async def test_sessions_survive_the_gateway_that_started_them() -> None:
    sessions = load_sessions(bundled_sessions())[:8]
    expected = expected_by_session(sessions, Prompts.load(str(bundled_tokenizer())), 64)
    async with LocalStack(OPTIONS) as stack:
        started: list[asyncio.Task[None]] = []
        seen = 0

        def turn_ended(record: TurnRecord) -> None:
            nonlocal seen
            seen += 1
            if seen == 20:
                stack.gateways[1].kill()
                started.append(asyncio.create_task(stack.start_gateway(1)))

        options = ReplayOptions(urls=stack.urls, model=OPTIONS.model, max_tokens=4)
        result = await replay(sessions, options, concurrency=4, on_turn=turn_ended)
        await asyncio.gather(*started)
        again = await replay(sessions[:1], replace(options, urls=stack.urls[1:], run="again-"), concurrency=1)
        folder = stack.folder

    comparison = compare(result.turns, expected)
    assert [record.error for record in result.turns if record.error is not None] == []
    assert comparison.differing == []
    assert comparison.same + len(comparison.repeated) == result.planned_turns
    assert compare(again.turns, expected).same == again.planned_turns
    assert not folder.exists()


async def test_failed_start_is_an_error_with_the_log_and_leaves_no_process() -> None:
    stack = LocalStack(replace(OPTIONS, tokenizer="/nowhere"))
    with pytest.raises(ChildError, match=r"(?s) exited with status \d\n.*(tokenizer|/nowhere)"):
        await stack.__aenter__()
    for child in [stack.redis, *stack.engines.values(), *stack.gateways]:
        with pytest.raises(ChildError, match="is not running"):
            _ = child.pid


PROMPT = list(range(1000))


async def cached_by_the_second_engine(stack: LocalStack) -> int:
    """The tokens that the greedy engine finds cached after the speculative one has computed a prompt."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    answer: Any = None
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        for pool in ("speculative", "greedy"):
            async with http.post(f"{stack.engine_urls[pool]}/generate", json=body) as response:
                answer = await response.json()
    return int(answer["meta_info"]["cached_tokens"])


@pytest.mark.parametrize(("sharing", "cached"), [("separate", 0), ("common", 960)])
async def test_engines_share_cached_prefixes_only_with_a_common_cache(sharing: Any, cached: int) -> None:
    async with LocalStack(replace(OPTIONS, gateways=1, prefix_cache=sharing)) as stack:
        assert await cached_by_the_second_engine(stack) == cached
        config = yaml.safe_load((stack.folder / "gateway-1.yaml").read_text())
        assert config["routing"]["commonPrefixCache"] == (sharing == "common")
    assert not stack.folder.exists()


def test_sglang_servers_with_a_common_cache_get_a_mooncake_master_of_their_python() -> None:
    sglang = SGLangOptions(model="m", draft_model="d", python="/venv/bin/python", version="0.5.23")
    stack = LocalStack(replace(OPTIONS, sglang=sglang, prefix_cache="common"))
    try:
        assert stack.mooncake is not None
        *command, rpc_port, _ = stack.mooncake.command
        assert command == ["/venv/bin/python", "-m", "mooncake.cli"]
        address = f"127.0.0.1:{rpc_port.removeprefix('--rpc_port=')}"
        assert all(address in " ".join(engine.command) for engine in stack.engines.values())
        assert (stack.folder / "plugin/dps_sglang/plugin.py").exists()
    finally:
        shutil.rmtree(stack.folder)


def test_stack_that_is_refused_leaves_no_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sglang = SGLangOptions(model="m", draft_model="d", version="0.5.24")
    with pytest.raises(EngineError, match="--prefix-cache common"):
        LocalStack(replace(OPTIONS, sglang=sglang, prefix_cache="common"))
    assert list(tmp_path.iterdir()) == []


async def test_second_signal_does_not_interrupt_the_cleanup() -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def slow_to_stop() -> AsyncIterator[None]:
        try:
            yield
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.3)
            steps.append("cleaned up")

    async def work() -> int:
        async with slow_to_stop():
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60.0)
        return 0

    assert await until_signal(work()) == 130
    assert steps == ["cleaned up"]
