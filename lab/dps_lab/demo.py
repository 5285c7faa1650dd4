"""`dps demo`: compare fleets of two engines in simulation, and kill a real gateway during a replay."""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from dps_gateway.pool import Pool
from dps_lab.arguments import positive_int
from dps_lab.plots import Outage, draw_demo
from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.oracle import expected_by_session
from dps_lab.replay.records import ReplayResult, TurnRecord
from dps_lab.replay.report import Comparison, compare, print_decisions
from dps_lab.replay.run import replay
from dps_lab.replay.source import load_source
from dps_lab.simulate import compare as fleets
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.report import Report
from dps_lab.simulate.workloads import load_workload
from dps_lab.workload.sessions import Session, Turn
from dps_local.assets import qwen_tokenizer
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.processes import ChildError
from dps_local.stack import LocalStack, StackOptions, until_signal

THRESHOLD_TOKENS: Final = 128
SIMULATED_SESSIONS: Final = 200
CONCURRENCY: Final = 8
KILLED: Final = 1
"""Index of the gateway that is killed."""
KILL_AFTER_TURNS: Final = 40
TURNS_AFTER_RESTART: Final = 50
"""Number of turns that the restarted gateway must serve before the replay ends."""
MAX_PASSES: Final = 20
"""Maximum number of times that the sessions are replayed."""
MAX_ANSWER_TOKENS: Final = 256
"""Limit on the length of answers, so that a single very long one does not dominate a run."""


@dataclass
class _Fault:
    """Kills a gateway after some turns, restarts it, and counts the turns that it answers afterwards."""

    stack: LocalStack
    console: Console
    began: float = field(default_factory=time.perf_counter)
    done: int = 0
    answered_after_restart: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    outage: Outage | None = None

    def turn_ended(self, record: TurnRecord) -> None:
        self.done += 1
        if self.done >= KILL_AFTER_TURNS:
            self.reached.set()
        if self.outage is not None and record.url == self.outage.url and record.error is None:
            self.answered_after_restart += 1

    async def inject(self) -> None:
        await self.reached.wait()
        name = f"gateway {KILLED + 1}"
        killed = time.perf_counter() - self.began
        self.stack.gateways[KILLED].kill()
        self.console.print(f"{name}: killed with SIGKILL")
        await self.stack.start_gateway(KILLED)
        self.outage = Outage(self.stack.urls[KILLED], killed, time.perf_counter() - self.began)
        self.console.print(f"{name}: restarted, ready {self.outage.ended - killed:.1f} s after the kill")


def choose(sessions: Sequence[Session], count: int, prompts: Prompts) -> list[Session]:
    """Select `count` sessions, evenly spread. Each turn requests as many tokens as its recorded answer has.

    Calls count as JSON.
    """
    count = min(count, len(sessions))
    chosen = [sessions[index * len(sessions) // count] for index in range(count)]
    return [
        session.model_copy(update={"turns": [_bounded(turn, prompts) for turn in session.turns]})
        for session in chosen
    ]


def _bounded(turn: Turn, prompts: Prompts) -> Turn:
    calls = [json.dumps(call["function"]) for call in turn.answer.get("tool_calls") or ()]
    tokens = max(1, prompts.text_tokens("\n".join([turn.answer.get("content") or "", *calls])))
    return turn.model_copy(update={"max_tokens": min(MAX_ANSWER_TOKENS, tokens)})


def verdict(planned: int, comparison: Comparison, lost: int) -> tuple[bool, list[str]]:
    """Whether the demo succeeded, and the lines that report it. planned, lost: numbers of requests."""
    decided = comparison.same + len(comparison.repeated) + len(comparison.differing)
    lines = [
        f"routing decisions that differ from the offline oracle: {len(comparison.differing)} of {decided}",
        f"requests lost after client retries: {lost} of {planned}",
    ]
    if comparison.repeated:
        lines.append(
            "retries with ΔL = 0, because the killed gateway had committed the turn but not answered it: "
            f"{len(comparison.repeated)}"
        )
    for record, expectation in comparison.differing[:5]:
        lines.append(f"  {record.session}, turn {record.turn}: {record.verdict}, expected {expectation}")
    return lost == 0 and not comparison.differing, lines


def simulated_fleets() -> dict[str, dict[str, dict[int, Report]]]:
    """The results of each fleet at each load, by the kind of speculation. They are the same in every run."""
    workload = load_workload("bfcl")
    sessions = random.Random(0).sample(workload, min(SIMULATED_SESSIONS, len(workload)))
    results = {}
    for speculation in ("batched", "serialized"):
        fleet = FleetSpec(dict.fromkeys(Pool, 1), cache="common", serialized=speculation == "serialized")
        results[speculation] = fleets.compare(lambda seed: sessions, fleet, THRESHOLD_TOKENS)
    return results


async def _replay(
    stack: LocalStack, sessions: Sequence[Session], console: Console
) -> tuple[ReplayResult, _Fault]:
    """Replay the sessions until the gateway that was killed has served enough turns again."""
    turns: list[TurnRecord] = []
    planned = sum(len(session.turns) for session in sessions)
    fault = _Fault(stack, console)
    injected = asyncio.create_task(fault.inject())
    for number in range(MAX_PASSES):
        started = time.perf_counter() - fault.began
        request = ReplayOptions(
            urls=stack.urls,
            model=stack.options.model,
            run=f"pass-{number}-",
            extra_body={"ignore_eos": True},
        )
        result = await replay(sessions, request, concurrency=CONCURRENCY, on_turn=fault.turn_ended)
        console.print(f"replay {number + 1}: {len(result.turns)} of {planned} turns")
        turns += [replace(record, started=record.started + started) for record in result.turns]
        if injected.done():
            await injected  # raises if the gateway could not be restarted
        if fault.answered_after_restart >= TURNS_AFTER_RESTART:
            break
    await injected
    planned *= number + 1
    return ReplayResult(planned, time.perf_counter() - fault.began, turns), fault


async def _demo(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    say = partial(console.print, sep="\n", markup=False, soft_wrap=True)
    tokenizer, (data, recorded) = qwen_tokenizer(), load_source("bfcl")
    say(
        f"1. Simulation: {SIMULATED_SESSIONS} sessions with the lengths of BFCL multi-turn, on two engines",
        "   (Qwen2.5-7B-Instruct on an A100 80 GB each, draft model Qwen2.5-1.5B-Instruct, common prefix cache)",
    )
    simulated = simulated_fleets()
    for speculation, results in simulated.items():
        console.print(*fleets.comparison_tables(results, f"{speculation} speculation"))
    prompts = Prompts.load(str(tokenizer.path))
    sessions = choose(recorded, arguments.sessions, prompts)
    say(
        f"2. Real time: {len(sessions)} sessions of {data}, {CONCURRENCY} at a time;",
        f"   two gateways with τ = {THRESHOLD_TOKENS}, Redis, two emulated engines; {tokenizer.description}",
    )
    expected = expected_by_session(sessions, prompts, THRESHOLD_TOKENS)
    options = StackOptions(
        tokenizer=tokenizer.path,
        gateways=2,
        policy="DeltaPrefill",
        threshold_tokens=THRESHOLD_TOKENS,
        prefix_cache="common",
    )
    async with LocalStack(options) as stack:
        say(f"decisions of gateway 1, live: {stack.admin_urls[0]}/")
        result, fault = await _replay(stack, sessions, console)
    draw_demo(simulated, result, fault.outage, arguments.plot)
    print_decisions(result, console)
    success, lines = verdict(result.planned_turns, compare(result.turns, expected), result.lost)
    served = fault.answered_after_restart
    say(*lines, f"turns served by the restarted gateway: {served}", f"plot: {arguments.plot.resolve()}")
    return 0 if success and served >= TURNS_AFTER_RESTART else 1


def parser() -> argparse.ArgumentParser:
    """The parser of `dps demo`."""
    result = argparse.ArgumentParser(
        prog="dps demo",
        description="Compare fleets of two engines in simulation. Then replay recorded sessions through two real "
        "gateways with emulated engines, kill one of the gateways, and check every routing decision against one that "
        "is computed offline.",
    )
    result.add_argument(
        "--sessions",
        type=positive_int,
        default=40,
        metavar="N",
        help="number of sessions to replay (default: 40)",
    )
    result.add_argument(
        "--plot",
        type=Path,
        default=Path("build/demo.png"),
        metavar="FILE",
        help="file for the plot (default: build/demo.png)",
    )
    return result


def main(argv: list[str]) -> int:
    """Run `dps demo`. Returns 1 if a request was lost, a decision differed, or a process did not start."""
    try:
        return asyncio.run(until_signal(_demo(parser().parse_args(argv))))
    except ChildError as error:
        print(f"dps demo: {error}", file=sys.stderr)
        return 1
