"""Replay sessions in a closed or an open loop, with the turns of each session in order."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence

import aiohttp

from dps_lab.replay.client import Client, ReplayOptions
from dps_lab.replay.records import ReplayResult, TurnRecord
from dps_lab.workload.sessions import Session


async def replay(
    sessions: Sequence[Session],
    options: ReplayOptions,
    *,
    concurrency: int = 1,
    rate: float | None = None,
    seed: int = 0,
    on_turn: Callable[[TurnRecord], None] = lambda record: None,
) -> ReplayResult:
    """Send every turn of every session and return the records. `on_turn` is called for each completed turn.

    In a closed loop, `concurrency` sessions are in flight, and the next one starts when one ends. With a `rate`,
    sessions arrive as a Poisson process with so many per second, however many are in flight. A session ends at a turn
    without an answer, because its later turns would lack their history.
    """
    began = time.perf_counter()
    turns: list[TurnRecord] = []

    def add(record: TurnRecord) -> None:
        turns.append(record)
        on_turn(record)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        client = Client(http, options)
        async with asyncio.TaskGroup() as tasks:
            if rate is None:
                remaining = iter(sessions)
                for _ in range(min(concurrency, len(sessions))):
                    tasks.create_task(_worker(client, remaining, options, add))
            else:
                rng = random.Random(seed)
                for session in sessions:
                    await asyncio.sleep(rng.expovariate(rate))
                    tasks.create_task(_worker(client, iter([session]), options, add))
    return ReplayResult(
        planned_turns=sum(len(session.turns) for session in sessions),
        wall_seconds=time.perf_counter() - began,
        turns=turns,
    )


async def _worker(
    client: Client, remaining: Iterator[Session], options: ReplayOptions, add: Callable[[TurnRecord], None]
) -> None:
    for session in remaining:
        history = session.opening()
        for number, turn in enumerate(session.turns, start=1):
            if turn.think_seconds:
                await asyncio.sleep(turn.think_seconds)
            history += turn.messages
            record, answer = await client.send(session, number, history)
            add(record)
            if answer is None:
                break
            history.append(turn.answer if options.answers == "recorded" else answer)
