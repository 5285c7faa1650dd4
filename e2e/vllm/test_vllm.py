"""vLLM with suffix decoding behind the gateway, as the speculative pool beside a greedy one of vLLM.

It has none of SGLang's own endpoints: neither its load reports, nor /server_info, nor /health_generate.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import aiohttp
import pytest
import pytest_asyncio

from dps_engines.pools import PoolName
from dps_lab.replay.client import Client, ReplayOptions
from dps_lab.replay.oracle import delta_prefill_pool
from dps_lab.replay.records import TurnRecord
from dps_lab.replay.source import load_source
from dps_lab.workload.sessions import Message, Session
from dps_local.stack import MODEL, LocalStack, StackOptions
from dps_testkit.http import metric
from e2e.broken_streams import REQUESTS, check_continued
from e2e.vllm.local_vllm import VLLM_INSTALLED, prepare, running

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not VLLM_INSTALLED, reason="vLLM is not installed; make e2e-vllm installs it"),
]

THRESHOLD = 128
SESSIONS, STRIDE = 2, 100
ANSWER_TOKENS = 16
REASONS = {"greedy": "over_threshold", "speculative": "within_threshold"}
Answers = list[Message | None]
Mode = Literal["complete", "streamed"]
MODES: tuple[Mode, ...] = ("complete", "streamed")


@dataclass(frozen=True)
class Engines:
    """The running engines: their base URLs by pool, and the folder of the model that both serve."""

    urls: Mapping[PoolName, str]
    model: Path


@dataclass(frozen=True)
class Played:
    """The turns of all sessions in order."""

    records: list[TurnRecord]
    answers: Answers


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    return list(islice(load_source("bfcl")[1], 0, SESSIONS * STRIDE, STRIDE))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    model = await asyncio.to_thread(prepare)
    async with running(model, tmp_path_factory.mktemp("engines")) as urls:
        yield Engines(urls, model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(engines: Engines) -> AsyncIterator[str]:
    """The base URL of a gateway with the paper's rule."""
    async with LocalStack(_stack(engines, "DeltaPrefill")) as stack:
        yield stack.urls[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def greedy(engines: Engines, sessions: Sequence[Session]) -> Answers:
    """The answers of the greedy engine without a gateway."""
    return (await _play(f"{engines.urls['greedy']}/v1", sessions, "complete")).answers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played(gateway: str, sessions: Sequence[Session]) -> Mapping[Mode, Played]:
    """The sessions, sent through the gateway in each mode."""
    return {mode: await _play(gateway, sessions, mode) for mode in MODES}


def _stack(engines: Engines, policy: str) -> StackOptions:
    return StackOptions(
        tokenizer=engines.model, policy=policy, threshold_tokens=THRESHOLD, engine_urls=engines.urls
    )


async def _play(url: str, sessions: Sequence[Session], mode: Mode) -> Played:
    """Send every turn with the recorded answers as history."""
    options = ReplayOptions(
        urls=[url],
        model=MODEL,
        stream=mode == "streamed",
        run=f"{mode} ",
        max_tokens=ANSWER_TOKENS,
        extra_body={"temperature": 0},
        attempts=1,
    )
    async with aiohttp.ClientSession() as http:
        client = Client(http, options)
        turns = [
            await client.send(session, number, prompt)
            for session in sessions
            for number, prompt in enumerate(session.prompts(), start=1)
        ]
    assert [record.error for record, _ in turns] == [None] * len(turns)
    return Played([record for record, _ in turns], [answer for _, answer in turns])


@pytest.mark.parametrize("mode", MODES)
async def test_turns_are_routed_by_the_growth_of_their_prompts(
    sessions: Sequence[Session], played: Mapping[Mode, Played], mode: Mode
) -> None:
    records = iter(played[mode].records)
    for session in sessions:
        first, *later = [next(records) for _ in session.turns]
        # SGLang renders tools with a field that other engines do not have, so the first count is too high.
        assert 0 < _prompt_tokens(first) - first.usage.prompt_tokens < 0.03 * first.usage.prompt_tokens
        assert _routed(first) == ("greedy", "over_threshold", "new", _prompt_tokens(first), 1)
        before = first.usage.prompt_tokens
        for turn, record in enumerate(later, start=2):
            delta = record.usage.prompt_tokens - before
            pool = delta_prefill_pool(delta, THRESHOLD)
            assert _routed(record) == (pool, REASONS[pool], "grown", delta, turn)
            assert _prompt_tokens(record) == record.usage.prompt_tokens
            before = record.usage.prompt_tokens
    assert {record.verdict.pool for record in played[mode].records} == REASONS.keys()


def _routed(record: TurnRecord) -> tuple[str | None, str | None, str | None, int | None, int | None]:
    verdict = record.verdict
    return verdict.pool, verdict.reason, verdict.history, verdict.delta_tokens, verdict.turn


def _prompt_tokens(record: TurnRecord) -> int:
    assert record.verdict.prompt_tokens is not None
    return record.verdict.prompt_tokens


@pytest.mark.parametrize("mode", MODES)
async def test_answers_equal_those_of_the_greedy_engine(
    played: Mapping[Mode, Played], greedy: Answers, mode: Mode
) -> None:
    assert played[mode].answers == greedy
    assert {record.usage.completion_tokens for record in played[mode].records} == {ANSWER_TOKENS}


@pytest.mark.usefixtures("played")
async def test_streams_that_break_off_are_continued_by_the_other_engine(engines: Engines) -> None:
    await check_continued(engines.urls, engines.model, REQUESTS)


async def test_only_the_speculative_engine_verifies_drafts(engines: Engines) -> None:
    assert await _accepted_drafts(engines, "greedy") == 0
    assert await _accepted_drafts(engines, "speculative") > 0


async def _accepted_drafts(engines: Engines, pool: PoolName) -> float:
    """The draft tokens that an engine has accepted."""
    return await metric(engines.urls[pool], "vllm:spec_decode_num_accepted_tokens_total")


async def test_adaptive_policy_works_without_load_reports(
    engines: Engines, sessions: Sequence[Session], greedy: Answers
) -> None:
    session, *_ = sessions
    async with LocalStack(_stack(engines, "Adaptive")) as stack:
        played = await _play(stack.urls[0], [session], "streamed")
    assert played.answers == greedy[: len(session.turns)]
    assert {record.verdict.reason for record in played.records} <= {"predicted_faster", "fixed"}
