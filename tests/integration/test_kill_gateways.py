"""Session state survives the loss of gateways: killing them at random under load changes no decision."""

import asyncio
import random

import pytest
import yaml

from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.oracle import Decision, PromptCounter, expected_by_session
from dps_lab.replay.records import ReplayResult, TurnRecord
from dps_lab.replay.run import ClosedLoop, replay
from dps_lab.replay.source import load_asset
from dps_lab.workload.assets import bfcl
from dps_lab.workload.sessions import Session
from dps_local.assets import qwen_tokenizer
from dps_local.stack import LocalStack, StackOptions

SESSIONS = 200
CONCURRENCY = 8
GATEWAYS = 3
THRESHOLD_TOKENS = 128
KILLS = 10
MAX_ANSWER_TOKENS = 16


def spread(sessions: list[Session], count: int) -> list[Session]:
    """`count` sessions, evenly distributed over all categories."""
    return [sessions[index * len(sessions) // count] for index in range(min(count, len(sessions)))]


class GatewayKiller:
    """Kills a gateway every few turns, with requests in flight, and starts it again.

    It does not wait until the previous gateway is ready, so at times all gateways are down.
    """

    def __init__(self, stack: LocalStack, turns: int, rng: random.Random) -> None:
        self.kills = 0
        self._stack = stack
        self._rng = rng
        self._turns = 0
        self._turns_between_kills = turns // KILLS
        self._alive = set(range(GATEWAYS))
        self._restarts: set[asyncio.Task[None]] = set()

    def turn_ended(self, record: TurnRecord) -> None:
        self._turns += 1
        if self._turns % self._turns_between_kills == 0 and self._alive:
            victim = self._rng.choice(sorted(self._alive))
            self._alive.remove(victim)
            self._stack.kill_gateway(victim)
            self.kills += 1
            self._restarts.add(asyncio.create_task(self._restart(victim)))

    async def _restart(self, victim: int) -> None:
        await self._stack.start_gateway(victim)
        self._alive.add(victim)

    async def wait_restarted(self) -> None:
        """Wait until all gateways are ready. Raises ChildError if one does not start."""
        await asyncio.gather(*self._restarts)


def raise_redis_timeout(stack: LocalStack) -> None:
    """Use a long Redis timeout, because Redis stays available and a busy machine must not look like an outage."""
    for file in stack.folder.glob("gateway-*.yaml"):
        configuration = yaml.safe_load(file.read_text())
        configuration["session"]["redisTimeoutSeconds"] = 10
        file.write_text(yaml.safe_dump(configuration))


def first_decisions(result: ReplayResult) -> dict[str, list[Decision | None]]:
    """The decision in the first response headers of each turn; None if no attempt received headers."""

    def decision(record: TurnRecord) -> Decision | None:
        verdict = record.verdict
        if (
            verdict.pool is None
            or verdict.delta_tokens is None
            or verdict.prompt_tokens is None
            or verdict.turn is None
        ):
            return None
        return Decision(verdict.pool, verdict.delta_tokens, verdict.prompt_tokens, verdict.turn)

    return {session: [decision(record) for record in turns] for session, turns in result.by_session().items()}


@pytest.mark.timeout(900)  # takes half a minute, or three minutes on a busy machine
async def test_killed_gateways_change_no_routing_decision() -> None:
    tokenizer = qwen_tokenizer().path
    sessions = spread(load_asset(bfcl()), SESSIONS)
    stack = LocalStack(
        StackOptions(tokenizer, gateways=GATEWAYS, threshold_tokens=THRESHOLD_TOKENS, speed=1000.0)
    )
    raise_redis_timeout(stack)
    async with stack:
        oracle = asyncio.create_task(
            asyncio.to_thread(expected_by_session, sessions, PromptCounter(tokenizer), THRESHOLD_TOKENS)
        )
        killer = GatewayKiller(stack, sum(len(session.turns) for session in sessions), random.Random(20))
        result = await replay(
            sessions,
            ReplayOptions(
                urls=stack.urls, model=stack.options.model, max_tokens=MAX_ANSWER_TOKENS, attempts=40
            ),
            ClosedLoop(CONCURRENCY),
            on_turn=killer.turn_ended,
        )
        await killer.wait_restarted()
        expected = await oracle

    assert [record for record in result.turns if record.error is not None] == []
    assert first_decisions(result) == expected
    assert killer.kills >= GATEWAYS
    assert sum(record.attempts > 1 for record in result.turns) > 0, "no request was in flight at any kill"
