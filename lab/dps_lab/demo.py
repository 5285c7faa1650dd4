"""`dps demo`: compare fleets of two engines on the same sessions, and kill a gateway during a run."""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from dps_lab.arguments import positive_float, positive_int
from dps_lab.fleets import FLEETS, THRESHOLD_TOKENS, Fleet, conclusion
from dps_lab.plots import DemoPlot, Outage, draw_demo
from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.oracle import Decision, PromptCounter, expected_by_session
from dps_lab.replay.progress import Progress
from dps_lab.replay.records import ReplayResult, TurnRecord
from dps_lab.replay.report import Comparison, compare, summarize
from dps_lab.replay.run import ClosedLoop, replay
from dps_lab.replay.source import load_asset
from dps_lab.replay.tables import fleets_table, lengths_table, routes_table
from dps_lab.workload.assets import bfcl
from dps_lab.workload.sessions import Session, Turn
from dps_local.assets import Asset, qwen_tokenizer
from dps_local.processes import ChildError
from dps_local.stack import LocalStack, StackOptions, until_signal

CONCURRENCY = 8
FAULTED = next(f for f in FLEETS if f.policy == "DeltaPrefill" and f.prefix_cache == "common")
"""The fleet with which a gateway is killed, in a further replay that is not part of the comparison."""
KILLED = 1
"""Index of the gateway that is killed."""
KILL_AT = 0.1
"""Share of the turns after which the gateway is killed."""
OUTAGE_SECONDS = 0.5
"""Time between the kill and the restart."""
MAX_ANSWER_TOKENS = 256
"""Limit on the length of answers, so that a single very long one does not dominate a run."""


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


@dataclass(frozen=True)
class _Results:
    """The runs of the demo."""

    runs: Sequence[ReplayResult]
    """One for each of FLEETS."""
    faulted: ReplayResult
    """The run during which a gateway was killed."""
    fault: _Fault

    def check(self, expected: Mapping[str, Sequence[Decision]]) -> tuple[bool, list[str]]:
        """Compare the decisions of the routing rule with the expected ones, and count lost requests; see `verdict`."""
        every = [*self.runs, self.faulted]
        ruled = [run for fleet, run in zip(FLEETS, self.runs, strict=True) if fleet.policy == FAULTED.policy]
        return verdict(
            sum(run.planned_turns for run in every),
            compare([turn for run in [*ruled, self.faulted] for turn in run.turns], expected),
            sum(summarize(run).lost for run in every),
        )


@dataclass(frozen=True)
class _Demo:
    """Replays the same sessions through each fleet, and once more while a gateway is killed."""

    arguments: argparse.Namespace
    tokenizer: Path
    sessions: Sequence[Session]
    console: Console

    async def run(self) -> _Results:
        runs: list[ReplayResult] = []
        for fleet in FLEETS:
            with_fault = fleet == FAULTED
            async with LocalStack(self._options(fleet, gateways=2 if with_fault else 1)) as stack:
                runs.append((await self._replay(fleet.label, stack, stack.urls[:1]))[0])
                if with_fault:
                    faulted, fault = await self._replay("gateway killed", stack, stack.urls)
        return _Results(runs, faulted, fault)  # both are set, because FAULTED is one of FLEETS

    def _options(self, fleet: Fleet, gateways: int) -> StackOptions:
        return StackOptions(
            tokenizer=self.tokenizer,
            gateways=gateways,
            policy=fleet.policy,
            threshold_tokens=THRESHOLD_TOKENS,
            emulated_engines=fleet.engines,
            prefix_cache=fleet.prefix_cache,
            speed=self.arguments.speed,
            serialized_speculation=self.arguments.serialized_speculation,
        )

    async def _replay(
        self, label: str, stack: LocalStack, urls: Sequence[str]
    ) -> tuple[ReplayResult, _Fault]:
        """Replay all sessions. With several URLs, kill a gateway during the replay."""
        turns = sum(len(session.turns) for session in self.sessions)
        request = ReplayOptions(
            urls=urls,
            model=stack.options.model,
            run="fault-" if len(urls) > 1 else "",
            extra_body={"ignore_eos": True},
        )
        with Progress(self.console, label, turns) as progress:
            fault = _Fault(stack, progress, turns)
            async with asyncio.TaskGroup() as tasks:
                if len(urls) > 1:
                    tasks.create_task(fault.inject())
                result = await replay(
                    self.sessions, request, ClosedLoop(CONCURRENCY), label=label, on_turn=fault.turn_ended
                )
        return result, fault


async def _demo(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False)
    tokenizer, data = qwen_tokenizer(), bfcl()
    counter = PromptCounter(tokenizer.path)
    sessions = choose(load_asset(data), arguments.sessions, counter)
    _print_lines(console, _introduction(arguments, sessions, data, tokenizer))
    expected = expected_by_session(sessions, counter, THRESHOLD_TOKENS)
    results = await _Demo(arguments, tokenizer.path, sessions, console).run()
    _draw(arguments, results, sessions, data)
    _print_tables(console, results, arguments.speed)
    success, lines = results.check(expected)
    _print_lines(console, lines)
    console.print(f"plot: {arguments.plot.resolve()}", markup=False, soft_wrap=True)
    return 0 if success else 1


def _speculation(arguments: argparse.Namespace) -> str:
    return "one request at a time" if arguments.serialized_speculation else "in batches"


def _introduction(
    arguments: argparse.Namespace, sessions: Sequence[Session], data: Asset, tokenizer: Asset
) -> list[str]:
    pace = "in real time" if arguments.speed == 1 else f"{arguments.speed:g} emulated seconds per real second"
    return [
        f"sessions: {len(sessions)} of {data.description}; {CONCURRENCY} at a time",
        f"tokenizer: {tokenizer.description}",
        "engines: emulated, without a GPU; two per fleet, with the timing of Qwen2.5-7B-Instruct on an A100 80 GB each "
        f"and Qwen2.5-1.5B-Instruct as draft model; speculation {_speculation(arguments)}; {pace}",
    ]


def _draw(arguments: argparse.Namespace, results: _Results, sessions: Sequence[Session], data: Asset) -> None:
    name = "BFCL multi-turn" if data.source == "registry" else "the bundled sample"
    draw_demo(
        DemoPlot(
            runs=results.runs,
            faulted=results.faulted,
            threshold_tokens=THRESHOLD_TOKENS,
            time_scale=arguments.speed,
            urls=results.fault.stack.urls,
            outage=results.fault.outage,
            subtitle=f"{len(sessions)} sessions of {name}, {CONCURRENCY} at a time, on two engines; emulated "
            f"(Qwen2.5-7B-Instruct on A100 80 GB, speculation {_speculation(arguments)})",
        ),
        arguments.plot,
    )


def _print_tables(console: Console, results: _Results, speed: float) -> None:
    summaries = [summarize(run, speed) for run in results.runs]
    routed = summarize(results.faulted, speed)
    console.print()
    console.print(routes_table(routed), lengths_table(routed))
    console.print(
        fleets_table(summaries, "seven fleets of two engines: time for all sessions, and session latency")
    )
    _print_lines(console, conclusion(summaries))
    answered = results.fault.answered_after_restart
    console.print(f"turns answered by gateway {KILLED + 1} after its restart: {answered}")


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False)


def parser() -> argparse.ArgumentParser:
    """The parser of `dps demo`."""
    result = argparse.ArgumentParser(
        prog="dps demo",
        description="Replay recorded sessions through a gateway on several fleets of emulated engines, and compare "
        "their times. Then kill one of two gateways during a replay, and check every routing decision against one that "
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
        "--speed",
        type=positive_float,
        default=1.0,
        metavar="FACTOR",
        help="emulated seconds per real second (default: 1)",
    )
    result.add_argument(
        "--serialized-speculation",
        action="store_true",
        help="a speculative engine processes one request at a time, as in the paper's Table 2",
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
