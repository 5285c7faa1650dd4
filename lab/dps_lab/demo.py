"""`dps demo`: replay sessions through two gateways, kill one of them, and compare DPS with the static policies."""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from dps_lab.plots import DemoPlot, Outage, draw_demo
from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.oracle import PromptCounter, expected_by_session
from dps_lab.replay.progress import Progress
from dps_lab.replay.records import ReplayResult, TurnRecord
from dps_lab.replay.report import Comparison, compare, summarize
from dps_lab.replay.run import ClosedLoop, replay
from dps_lab.replay.source import load_asset
from dps_lab.replay.tables import lengths_table, routes_table, runs_table
from dps_lab.workload.assets import bfcl
from dps_lab.workload.sessions import Session, Turn
from dps_local.assets import qwen_tokenizer
from dps_local.processes import ChildError
from dps_local.stack import LocalStack, StackOptions, until_signal

THRESHOLD_TOKENS = 128
CONCURRENCY = 8
GATEWAYS = 2
KILLED = 1
"""Index of the gateway that is killed."""
KILL_AT = 0.25
"""Share of the turns after which the gateway is killed."""
OUTAGE_SECONDS = 0.5
"""Time between the kill and the restart."""
MAX_ANSWER_TOKENS = 256
"""Limit on the length of answers, so that a single very long one does not dominate a run."""

POLICIES = {
    f"DPS, τ = {THRESHOLD_TOKENS}": "DeltaPrefill",
    "greedy": "AlwaysGreedy",
    "always speculative": "AlwaysSpeculative",
}


@dataclass
class _Fault:
    """Kills a gateway after a share of the turns, restarts it, and records the outage.

    answered_after_restart: turns that the gateway answered after its restart.
    """

    stack: LocalStack
    progress: Progress
    turns: int
    done: int = 0
    answered_after_restart: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    outage: Outage | None = None

    def turn_ended(self, record: TurnRecord) -> None:
        self.progress.turn_ended(record)
        self.done += 1
        if self.done >= self.turns * KILL_AT:
            self.reached.set()
        if self.outage is not None and record.url == self.outage.url:
            self.answered_after_restart += 1

    async def inject(self) -> None:
        began = time.perf_counter()
        await self.reached.wait()
        name = f"gateway {KILLED + 1}"
        killed = time.perf_counter() - began
        self.stack.kill_gateway(KILLED)
        self.progress.event(f"{name}: killed with SIGKILL after {self.done} of {self.turns} turns")
        await asyncio.sleep(OUTAGE_SECONDS)
        await self.stack.start_gateway(KILLED)
        self.outage = Outage(self.stack.urls[KILLED], killed, time.perf_counter() - began)
        self.progress.event(f"{name}: restarted, ready {self.outage.ended - killed:.1f} s after the kill")


def choose(sessions: Sequence[Session], count: int, counter: PromptCounter) -> list[Session]:
    """Select `count` sessions, evenly spread. Each turn requests as many tokens as its recorded answer has."""
    count = min(count, len(sessions))
    chosen = [sessions[index * len(sessions) // count] for index in range(count)]
    return [
        session.model_copy(update={"turns": [_bounded(turn, counter) for turn in session.turns]})
        for session in chosen
    ]


def _bounded(turn: Turn, counter: PromptCounter) -> Turn:
    return turn.model_copy(update={"max_tokens": min(MAX_ANSWER_TOKENS, counter.answer_tokens(turn.answer))})


def verdict(result: ReplayResult, comparison: Comparison, lost: int) -> tuple[bool, list[str]]:
    """Whether the demo succeeded, and the lines that report it."""
    decided = comparison.same + len(comparison.repeated) + len(comparison.differing)
    lines = [
        f"routing decisions that differ from the offline oracle: {len(comparison.differing)} of {decided}",
        f"requests lost after client retries: {lost} of {result.planned_turns}",
    ]
    if comparison.repeated:
        lines.append(
            "retries with ΔL = 0, because the killed gateway had committed the turn but not answered it: "
            f"{len(comparison.repeated)}"
        )
    for record, expectation in comparison.differing[:5]:
        lines.append(f"  {record.session}, turn {record.turn}: {record.verdict}, expected {expectation}")
    return lost == 0 and not comparison.differing, lines


async def _run(
    label: str, sessions: Sequence[Session], options: StackOptions, console: Console, *, fault: bool
) -> tuple[ReplayResult, _Fault]:
    turns = sum(len(session.turns) for session in sessions)
    async with LocalStack(options) as stack:
        request = ReplayOptions(urls=stack.urls, model=options.model, extra_body={"ignore_eos": True})
        with Progress(console, label, turns) as progress:
            gateway_fault = _Fault(stack, progress, turns)
            async with asyncio.TaskGroup() as tasks:
                if fault:
                    tasks.create_task(gateway_fault.inject())
                result = await replay(
                    sessions, request, ClosedLoop(CONCURRENCY), label=label, on_turn=gateway_fault.turn_ended
                )
    return result, gateway_fault


async def _demo(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    tokenizer, data = qwen_tokenizer(), bfcl()
    counter = PromptCounter(tokenizer.path)
    sessions = choose(load_asset(data), arguments.sessions, counter)
    name = "BFCL multi-turn" if data.source == "registry" else "the bundled sample"
    serialized = "one request at a time" if arguments.serialized_speculation else "in batches"
    pace = "in real time" if arguments.speed == 1 else f"{arguments.speed:g} times faster than real time"
    for line in (
        f"sessions: {len(sessions)} of {data.description}",
        f"tokenizer: {tokenizer.description}",
        "engines: emulated, without a GPU; timing of Qwen2.5-7B-Instruct on an A100 80 GB per pool, with "
        f"Qwen2.5-1.5B-Instruct as draft model; speculation {serialized}; {pace}",
        f"load: {CONCURRENCY} concurrent sessions through {GATEWAYS} gateways that share one Redis",
    ):
        console.print(line, markup=False)

    expected = expected_by_session(sessions, counter, THRESHOLD_TOKENS)
    results: list[ReplayResult] = []
    faults: list[_Fault] = []
    for label, policy in POLICIES.items():
        options = StackOptions(
            tokenizer=tokenizer.path,
            gateways=GATEWAYS,
            policy=policy,
            threshold_tokens=THRESHOLD_TOKENS,
            speed=arguments.speed,
            serialized_speculation=arguments.serialized_speculation,
        )
        result, fault = await _run(label, sessions, options, console, fault=policy == "DeltaPrefill")
        results.append(result)
        faults.append(fault)

    summaries = [summarize(result, arguments.speed) for result in results]
    console.print()
    console.print(routes_table(summaries[0]), lengths_table(summaries[0]))
    console.print(runs_table(summaries, "the same sessions under each policy; times in emulated seconds"))
    console.print(
        "These pools do not share a KV cache: when a session moves to the other pool, its whole prompt is prefilled "
        "again. With short sessions and a static τ, this costs more than speculation gains.\n"
    )
    draw_demo(
        DemoPlot(
            runs=results,
            threshold_tokens=THRESHOLD_TOKENS,
            time_scale=arguments.speed,
            urls=faults[0].stack.urls,
            outage=faults[0].outage,
            subtitle=f"{len(sessions)} sessions of {name}, {CONCURRENCY} concurrent; emulated engines without a common "
            f"prefix cache (Qwen2.5-7B-Instruct on A100 80 GB, speculation {serialized})",
        ),
        arguments.plot,
    )
    success, lines = verdict(results[0], compare(results[0].turns, expected), sum(s.lost for s in summaries))
    console.print(
        f"turns answered by gateway {KILLED + 1} after its restart: {faults[0].answered_after_restart}"
    )
    for line in lines:
        console.print(line, markup=False)
    console.print(f"plot: {arguments.plot.resolve()}", markup=False, soft_wrap=True)
    return 0 if success else 1


def parser() -> argparse.ArgumentParser:
    """The parser of `dps demo`."""
    result = argparse.ArgumentParser(
        prog="dps demo",
        description="Replay recorded sessions through two gateways and emulated engines, kill one gateway during "
        "the run, check every routing decision against an offline oracle, and compare DPS with the static policies.",
    )
    result.add_argument(
        "--sessions", type=int, default=80, metavar="N", help="number of sessions (default: 80)"
    )
    result.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="emulated seconds per real second (default: 1)",
    )
    result.add_argument(
        "--serialized-speculation",
        action="store_true",
        help="the speculative engine processes one request at a time, as in the paper's Table 2",
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
