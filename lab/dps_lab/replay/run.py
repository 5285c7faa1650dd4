"""Replays sessions: turns in order within a session, sessions in a closed or an open loop."""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp

from dps_lab.replay.client import Client, ReplayOptions
from dps_lab.replay.records import ReplayResult, TurnRecord
from dps_lab.workload.sessions import Session


@dataclass(frozen=True)
class ClosedLoop:
    """So many sessions at once; the next one begins when one ends."""

    concurrency: int


@dataclass(frozen=True)
class OpenLoop:
    """Sessions arrive as a Poisson process of `rate` a second, however many are still under way."""

    rate: float
    seed: int = 0


Pace = ClosedLoop | OpenLoop


async def replay(
    sessions: Sequence[Session],
    options: ReplayOptions,
    pace: Pace,
    *,
    label: str = "",
    on_turn: Callable[[TurnRecord], None] = lambda record: None,
) -> ReplayResult:
    """Send every turn of every session and tell what was seen; `on_turn` hears of each turn as it ends.

    A session whose turn got no answer ends there: its later turns would have no history.
    """
    began = time.perf_counter()
    turns: list[TurnRecord] = []

    def note(record: TurnRecord) -> None:
        turns.append(record)
        on_turn(record)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        client = Client(http, options)
        async with asyncio.TaskGroup() as tasks:
            match pace:
                case ClosedLoop(concurrency):
                    waiting = iter(sessions)
                    for _ in range(min(concurrency, len(sessions))):
                        tasks.create_task(_worker(client, waiting, options, note))
                case OpenLoop(rate, seed):
                    rng = random.Random(seed)
                    for session in sessions:
                        await asyncio.sleep(rng.expovariate(rate))
                        tasks.create_task(_session(client, session, options, note))
    return ReplayResult(
        label=label,
        planned_turns=sum(len(session.turns) for session in sessions),
        wall_seconds=time.perf_counter() - began,
        turns=turns,
    )


async def _worker(
    client: Client, waiting: Iterator[Session], options: ReplayOptions, note: Callable[[TurnRecord], None]
) -> None:
    for session in waiting:
        await _session(client, session, options, note)


async def _session(
    client: Client, session: Session, options: ReplayOptions, note: Callable[[TurnRecord], None]
) -> None:
    history = session.opening()
    for number, turn in enumerate(session.turns, start=1):
        if turn.think_seconds:
            await asyncio.sleep(turn.think_seconds)
        history += turn.messages
        record, answer = await client.send(session, number, history)
        note(record)
        if answer is None:
            return
        history.append(turn.answer if options.answers == "recorded" else answer)
