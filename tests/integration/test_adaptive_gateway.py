"""The policy Adaptive in running gateways: its predictions, the load of other gateways, and what is kept in Redis."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from dps_testkit.data_plane import CHAT, chat, posted
from dps_testkit.processes import Gateway, LocalProcesses, RedisServer
from dps_testkit.waiting import wait_until
from tests.integration.leftovers import decisions, replicas_ready

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

ADAPTIVE = {"policy": "Adaptive"}
PREDICTED = re.compile(r"(speculative=\d+\.\d{3})?(?:(?<=\d),)?(greedy=\d+\.\d{3})?")

VERY_SLOW = ("--emulate-decode-step-seconds", "0.06", "0.0001")
"""Several times the time per token that the policy assumes before it has observed any."""


async def take_turn(gateway: Gateway, session: str) -> tuple[str, dict[str, float]]:
    """Send one streamed turn. Returns the pool that served it and the predicted seconds by pool."""
    async with posted(gateway.url + CHAT, chat(8, stream=True), **{"x-session-id": session}) as response:
        await response.read()
        # The reason is "fixed" while the errors of the predictions exceed the gain that they predict.
        assert (response.status, response.headers["x-dps-reason"] in ("predicted_faster", "fixed")) == (
            200,
            True,
        )
        match = PREDICTED.fullmatch(response.headers["x-dps-predicted"])
        assert match is not None
        pairs = (pair.split("=") for pair in match.groups() if pair is not None)
        return response.headers["x-dps-pool"], {pool: float(seconds) for pool, seconds in pairs}


@pytest_asyncio.fixture(loop_scope="module")
async def processes(tmp_path: Path) -> AsyncIterator[LocalProcesses]:
    async with LocalProcesses(tmp_path) as result:
        yield result


async def learned_by(redis: RedisServer) -> list[int]:
    """The number of turns that each gateway process has observed, according to Redis."""
    async with redis.client() as client:
        keys = await client.keys("dps:learned:Adaptive:*")
        return [orjson.loads(value)["turns"] for key in keys for value in await client.hvals(key)]


async def test_learned_speeds_survive_the_gateway_and_lost_engines_are_never_chosen(
    processes: LocalProcesses,
) -> None:
    redis = await processes.start_redis()
    (slow,) = await processes.start_engines("slow", arguments=VERY_SLOW)
    (fast,) = await processes.start_engines("fast")
    sections: dict[str, dict[str, Any]] = {
        "routing": ADAPTIVE,
        "session": {"redisUrl": redis.url, "redisTimeoutSeconds": 5},
    }

    first = await processes.start_gateway([slow], [fast], sections)
    pool, predicted = await take_turn(first, "0")
    assert pool == "speculative"
    assert predicted["speculative"] < predicted["greedy"]
    turns = 1
    while predicted["speculative"] <= 1.2 * predicted["greedy"]:
        assert turns < 60, predicted
        _, predicted = await take_turn(first, str(turns))
        turns += 1

    async def written() -> bool:
        return await learned_by(redis) == [turns]

    await wait_until(written, "what the gateway has learned is in Redis")
    first.child.kill()

    second = await processes.start_gateway([slow], [fast], sections)

    async def exchanged() -> bool:
        return sorted(await learned_by(redis)) == [0, turns]

    await wait_until(exchanged, "the new gateway has exchanged what it has learned")
    pool, predicted = await take_turn(second, "after the restart")
    assert pool == "greedy"
    assert predicted["speculative"] > predicted["greedy"]

    fast.child.kill()
    await replicas_ready(second, 0, pool="greedy")
    for number in range(3):
        pool, predicted = await take_turn(second, f"without the fast engine {number}")
        assert (pool, list(predicted)) == ("speculative", ["speculative"])
    assert await second.metric("dps_prediction_error_seconds_count") == 4


async def with_drafts(processes: LocalProcesses, log: Path) -> Gateway:
    """A gateway of an engine with a draft model and one without, that writes this decision log."""
    redis = await processes.start_redis()
    drafting = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "draft")
    (speculative,) = await processes.start_engines("speculative", arguments=drafting)
    (greedy,) = await processes.start_engines("greedy")
    return await processes.start_gateway(
        [speculative],
        [greedy],
        {
            "routing": ADAPTIVE | {"decisionLog": str(log)},
            "session": {"redisUrl": redis.url, "redisTimeoutSeconds": 5},
        },
    )


async def test_sessions_are_told_apart_by_their_acceptance_which_clients_do_not_see(
    processes: LocalProcesses, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    gateway = await with_drafts(processes, log)
    for stream in (True, False):
        for session, acceptance in (("low", "0"), ("high", "1")):
            headers = {"x-session-id": session, "x-emulate-acceptance": acceptance}
            async with posted(gateway.url + CHAT, chat(40, stream=stream), **headers) as response:
                apart = not stream and session == "low"
                assert response.headers["x-dps-pool"] == ("greedy" if apart else "speculative")
                assert b"sglext" not in await response.read()
    first_low, first_high, low, high = await decisions(log, 4)
    assert (first_low["verifications"], first_high["verifications"]) == (39, 10)
    assert low["expected_tokens_per_verification"] < 1.5
    assert high["expected_tokens_per_verification"] > 2.8
    assert await gateway.metric("dps_draft_verifications_total", pool="speculative") == 39 + 10 + 10


async def test_acceptance_that_the_engine_does_not_report_is_inferred_from_the_time_per_token(
    processes: LocalProcesses, tmp_path: Path
) -> None:
    log = tmp_path / "decisions.jsonl"
    gateway = await with_drafts(processes, log)
    for _ in range(2):
        for session, acceptance in (("low", "0"), ("high", "1")):
            headers = {"x-session-id": session, "x-emulate-acceptance": acceptance}
            async with posted(gateway.url + "/v1/messages", chat(100, stream=True), **headers) as response:
                await response.read()
                assert response.status == 200

    async def logged() -> bool:
        return log.exists() and log.read_text().count("\n") == 4

    await wait_until(logged, "all turns are in the decision log")
    first, _, low, high = (orjson.loads(line) for line in log.read_text().splitlines())
    assert first["verifications"] is None
    assert low["expected_tokens_per_verification"] < 0.7 * high["expected_tokens_per_verification"]
