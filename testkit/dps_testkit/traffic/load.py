"""Continuous load: concurrent agents, each of which sends one multi-turn session after another."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from openai.types.chat import ChatCompletionMessageParam

from dps_testkit.traffic.client import Client, Turn
from dps_testkit.traffic.session_state import LastTurn, lost_state
from dps_testkit.traffic.table import Observed, Row, row, undisturbed_median

SHORT, LONG = "And why is that?", "Tell me more about the sky over Oslo in November, please. " * 20
"""User messages of less and of more than 128 tokens."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class LoadOptions:
    """The parameters of the load.

    base_url: includes /v1. agents: number of concurrent sessions. think_seconds: pause between turns.
    attempts: how often a turn is sent before it counts as failed; the pauses between 30 attempts add up to 51 s.
    """

    base_url: str
    model: str
    agents: int = 8
    turns: int = 6
    answer_tokens: int = 12
    think_seconds: float = 0.1
    attempts: int = 30


@dataclass
class Traffic:
    """Running load. `checkpoint` summarises the turns since the previous checkpoint."""

    options: LoadOptions
    rows: list[Row] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """The turns that ended since the last checkpoint."""
    _baseline: dict[bool, float] = field(default_factory=dict)
    _agents: list[asyncio.Task[None]] = field(default_factory=list)
    _began: dict[int, float] = field(default_factory=dict)
    """Start time of the last finished turn, by agent."""

    async def checkpoint(self, case: str) -> Row:
        """Summarise all turns since the last checkpoint, once every agent has finished a turn begun after this call.

        The first checkpoint is the undisturbed baseline for the others.
        """
        now = time.monotonic()
        await self._until(lambda: all(began > now for began in self._began.values()))
        turns, self.turns = self.turns, []
        if not self.rows:
            for streamed in (False, True):
                self._baseline[streamed] = undisturbed_median(
                    [turn.latency for turn in turns if turn.streamed is streamed]
                )
        summary = row(case, [self._observed(turn) for turn in turns])
        self.rows.append(summary)
        return summary

    async def observe(self, turns: int) -> None:
        """Wait until `turns` more turns have ended."""
        target = len(self.turns) + turns
        await self._until(lambda: len(self.turns) >= target)

    async def start(self) -> None:
        """Start the agents, which run until `stop`."""
        self._began = dict.fromkeys(range(self.options.agents), 0.0)
        self._agents = [asyncio.create_task(self._agent(number)) for number in self._began]

    async def stop(self) -> None:
        """Cancel the agents, even in the middle of a turn."""
        for agent in self._agents:
            agent.cancel()
        await asyncio.gather(*self._agents, return_exceptions=True)

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached` is true. Raises the exception of any agent that has ended."""
        while not reached():
            for agent in self._agents:
                if agent.done():
                    agent.result()
            await asyncio.sleep(POLL_SECONDS)

    def _observed(self, turn: Turn) -> Observed:
        return Observed(
            latency=turn.latency,
            added=turn.latency - self._baseline[turn.streamed],
            retries=len(turn.attempts) - 1,
            events=sum(attempt.event for attempt in turn.attempts),
            failed=turn.failed,
            troubles=tuple(attempt.error for attempt in turn.attempts if attempt.error is not None),
            lost=turn.lost,
            from_memory=turn.verdict is not None and turn.verdict.state != "redis",
        )

    async def _agent(self, number: int) -> None:
        """Send sessions until cancelled. Every second session sends its id; two of every four reuse connections."""
        options = self.options
        for session in itertools.count(number):
            keep_alive = session // 2 % 2 == 0
            async with Client(
                options.base_url,
                options.model,
                options.answer_tokens,
                options.attempts,
                keep_alive=keep_alive,
            ) as client:
                await self._session(client, number, named=session % 2 == 0)

    async def _session(self, client: Client, agent: int, *, named: bool) -> None:
        identity = uuid4().hex
        history: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": f"You are assistant {identity} of the weather desk."}
        ]
        last = LastTurn()
        for number in range(self.options.turns):
            # Agents are out of phase, so that short and long turns, streaming or not, run at the same time.
            text = LONG if (agent // 2 + number) % 2 else SHORT
            history.append({"role": "user", "content": f"{number}: {text}"})
            turn = await client.send(history, identity if named else None, stream=(agent + number) % 2 == 0)
            turn.lost = _lost(last, turn)
            self.turns.append(turn)
            self._began[agent] = turn.began
            verdict = turn.verdict
            if turn.failed or verdict is None or verdict.turn is None or verdict.prompt_tokens is None:
                return
            last = LastTurn(verdict.turn, verdict.prompt_tokens)
            history.append({"role": "assistant", "content": turn.answer})
            await asyncio.sleep(self.options.think_seconds)


def _lost(last: LastTurn, turn: Turn) -> str | None:
    """The first session state found lost, or prompt length found wrong, in the attempts of a turn."""
    for number, attempt in enumerate(turn.attempts):
        if attempt.verdict is None:
            continue
        if lost := lost_state(last, attempt.verdict, repeated=number > 0):
            return lost
        counted = attempt.verdict.prompt_tokens
        if attempt.error is None and counted != turn.prompt_tokens:
            return f"the gateway counted {counted} prompt tokens, the engine counted {turn.prompt_tokens}"
    return None


@asynccontextmanager
async def traffic(options: LoadOptions) -> AsyncIterator[Traffic]:
    """Generate load until the block exits."""
    running = Traffic(options)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()
