"""Without session ids, BFCL sessions are recognised by their history alone."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from dps_gateway.api.public import public_app
from dps_gateway.config import GatewayConfig
from dps_gateway.prompt.description import Description
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.runtime import Runtime
from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.records import TurnRecord
from dps_lab.replay.run import ClosedLoop, replay
from dps_lab.replay.source import load_asset
from dps_lab.workload.assets import bfcl
from dps_lab.workload.sessions import Session
from dps_local.assets import qwen_tokenizer
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.server import create_app
from dps_local.emulated_sglang.settings import EngineSettings
from dps_local.stack import MODEL
from dps_testkit.clock import VirtualClock
from dps_testkit.processes import LocalProcesses

IDS = range(0, 200, 10)
"""BFCL derives its categories from each other, so sessions with the same number often share a beginning."""

Prompt = str


def sampled_sessions() -> list[Session]:
    """Sessions with the same numbers from every category."""
    numbers = {f"_{number}" for number in IDS}
    return [session for session in load_asset(bfcl()) if session.id[session.id.rindex("_") :] in numbers]


class Fleet:
    """A gateway and two emulated engines in virtual time, all in this process, and a Redis server."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def replay(self, sessions: list[Session], ids: Literal["header", "none"]) -> list[TurnRecord]:
        """Replay one session after another, so that the state at each turn is deterministic."""
        options = ReplayOptions([f"{self._url}/v1"], MODEL, session_ids=ids, max_tokens=1, attempts=1)
        result = await replay(sessions, options, ClosedLoop(1))
        assert [record for record in result.turns if record.error is not None] == []
        return list(result.turns)


@asynccontextmanager
async def fleet(tokenizer: object, folder: Path) -> AsyncIterator[Fleet]:
    settings = EngineSettings(str(qwen_tokenizer().path))
    async with AsyncExitStack() as stack:
        prompts = Prompts(tokenizer)
        engines = [
            await stack.enter_async_context(TestServer(create_app(settings, prompts, VirtualClock())))
            for _ in range(2)
        ]
        redis = await (await stack.enter_async_context(LocalProcesses(folder))).start_redis()
        config = GatewayConfig.model_validate(
            {
                "model": {"name": MODEL, "tokenizer": settings.tokenizer_path},
                "pools": {
                    name: {"endpoints": [str(engine.make_url(""))]}
                    for name, engine in zip(("speculative", "greedy"), engines, strict=True)
                },
                "session": {"redisUrl": redis.url, "redisTimeoutSeconds": 10},
            }
        )
        runtime = Runtime(config, Tokenizer(Description.of(tokenizer)))
        stack.push_async_callback(runtime.close)
        gateway = TestServer(public_app(runtime))
        await gateway.start_server()
        stack.push_async_callback(gateway.close)
        yield Fleet(str(gateway.make_url("")).rstrip("/"))


def prompts(session: Session) -> Iterator[Prompt]:
    """A canonical text of each turn's input: equal texts render to equal prompts."""
    for messages in session.prompts():
        yield json.dumps([session.tools, messages])


@pytest.mark.timeout(240)
async def test_sessions_without_ids_are_routed_like_sessions_with_ids(tmp_path: Path) -> None:
    if bfcl().source != "registry":
        pytest.skip("the bundled sample is not BFCL: its sessions have no common beginnings")
    tokenizer = AutoTokenizer.from_pretrained(qwen_tokenizer().path, local_files_only=True)
    sessions = sampled_sessions()
    async with fleet(tokenizer, tmp_path) as engines:
        named = await engines.replay(sessions, "header")
    async with fleet(tokenizer, tmp_path) as engines:
        unnamed = await engines.replay(sessions, "none")

    answered: dict[Prompt, set[str | None]] = {}
    repeated = after_repeated = found_cached = 0
    before_was_repeated = False
    every_prompt = [prompt for session in sessions for prompt in prompts(session)]
    for with_id, without, prompt in zip(named, unnamed, every_prompt, strict=True):
        actual, expected = without.verdict, with_id.verdict
        assert actual.prompt_tokens == expected.prompt_tokens
        if prompt not in answered:
            # The prompt is new: it is routed as with a session id, even if its history is shared by other sessions.
            assert (actual.pool, actual.delta_tokens) == (expected.pool, expected.delta_tokens)
            after_repeated += before_was_repeated and with_id.turn > 1
            before_was_repeated = False
        else:
            # Another session had the same prompt: its delta is 0, and the pool that answered it has it cached.
            assert (actual.pool, actual.delta_tokens) == ("speculative", 0)
            if actual.pool in answered[prompt]:
                assert without.usage.cached_tokens == without.usage.prompt_tokens - 1
                found_cached += 1
            repeated += 1
            before_was_repeated = True
        answered.setdefault(prompt, set()).add(actual.pool)
    assert {record.verdict.state for record in unnamed} == {"redis"}
    assert min(repeated, after_repeated, found_cached) > 10, "BFCL's categories must share beginnings"
