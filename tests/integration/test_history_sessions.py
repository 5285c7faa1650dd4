"""Clients that send no session id: BFCL's sessions are recognised by their history alone."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from dps_gateway.app import public_app
from dps_gateway.config import GatewayConfig
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.runtime import Runtime
from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.records import TurnRecord
from dps_lab.replay.run import ClosedLoop, replay
from dps_lab.replay.source import load_asset
from dps_lab.workload.assets import bfcl
from dps_lab.workload.sessions import Session
from dps_local.assets import qwen_tokenizer
from dps_local.emulated_sglang.clock import VirtualClock
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.server import create_app
from dps_local.emulated_sglang.settings import EngineSettings
from dps_local.stack import MODEL
from dps_testkit.processes import Site

IDS = range(0, 200, 10)
"""BFCL derives its categories from one another: session n of one often begins as session n of another."""

Prompt = str


def some_sessions() -> list[Session]:
    """The same numbers of every category."""
    numbers = {f"_{number}" for number in IDS}
    everything = load_asset(bfcl())
    return [session for session in everything if session.id[session.id.rindex("_") :] in numbers]


class Fleet:
    """Two emulated engines in virtual time and a gateway, in this process, with Redis beside it."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def replay(self, sessions: list[Session], ids: Literal["header", "none"]) -> list[TurnRecord]:
        """One session after the other, so that what is known at each turn is plain."""
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
        redis = await (await stack.enter_async_context(Site(folder))).redis()
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
        runtime = Runtime(config, Tokenizer(tokenizer))
        stack.push_async_callback(runtime.close)
        gateway = TestServer(public_app(runtime))
        await gateway.start_server()
        stack.push_async_callback(gateway.close)
        yield Fleet(str(gateway.make_url("")).rstrip("/"))


def prompts(session: Session) -> Iterator[Prompt]:
    """What each turn's prompt is rendered from: the same text, the same prompt."""
    for messages in session.prompts():
        yield json.dumps([session.tools, messages])


@pytest.mark.timeout(240)
async def test_sessions_without_ids_are_routed_as_those_with_ids(tmp_path: Path) -> None:
    if bfcl().source != "registry":
        pytest.skip("the bundled sample is not BFCL: its sessions share nothing")
    tokenizer = AutoTokenizer.from_pretrained(qwen_tokenizer().path, local_files_only=True)
    sessions = some_sessions()
    async with fleet(tokenizer, tmp_path) as engines:
        named = await engines.replay(sessions, "header")
    async with fleet(tokenizer, tmp_path) as engines:
        unnamed = await engines.replay(sessions, "none")

    answered: dict[Prompt, set[str | None]] = {}
    repeated = after_repeated = found_cached = 0
    before_was_repeated = False
    every_prompt = [prompt for session in sessions for prompt in prompts(session)]
    for with_id, without, prompt in zip(named, unnamed, every_prompt, strict=True):
        told, truth = without.verdict, with_id.verdict
        assert told.prompt_tokens == truth.prompt_tokens
        if prompt not in answered:
            # Nobody sent this prompt before: it is routed as if the client had said whose it is, also right after
            # a history that others share.
            assert (told.pool, told.delta_tokens) == (truth.pool, truth.delta_tokens)
            after_repeated += before_was_repeated and with_id.turn > 1
            before_was_repeated = False
        else:
            # Another session began with all of this: nothing in it is new, and the pool that answered has it.
            assert (told.pool, told.delta_tokens) == ("speculative", 0)
            if told.pool in answered[prompt]:
                assert without.usage.cached_tokens == without.usage.prompt_tokens - 1
                found_cached += 1
            repeated += 1
            before_was_repeated = True
        answered.setdefault(prompt, set()).add(told.pool)
    assert {record.verdict.state for record in unnamed} == {"redis"}
    assert min(repeated, after_repeated, found_cached) > 10, "BFCL's categories share beginnings"
