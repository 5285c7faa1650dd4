"""`python -m dps_lab.validate`: run sessions through the gateway in real time, and simulate the same run."""

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence

from dps_lab.demo import choose
from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.oracle import PromptCounter
from dps_lab.replay.records import ReplayResult
from dps_lab.replay.report import Summary, summarize
from dps_lab.replay.run import ClosedLoop, replay
from dps_lab.replay.source import load_source
from dps_lab.simulate.workloads import load_workload
from dps_lab.validate.runs import RUNS, THRESHOLD_TOKENS, ValidationRun, lengths, scaled, simulated
from dps_lab.workload.sessions import Session
from dps_local.assets import qwen_tokenizer
from dps_local.stack import LocalStack, StackOptions

COLUMNS = "workload|policy|cache|c|batch, gateway|simulated|difference|median, gateway|simulated|difference"


def main(argv: Sequence[str]) -> int:
    """Print a row when a run has completed. Returns 1 if a turn was lost."""
    parser = argparse.ArgumentParser(prog="python -m dps_lab.validate", description=__doc__)
    parser.add_argument(
        "--speed", type=float, default=1.0, help="emulated seconds per real second (default: 1)"
    )
    parser.add_argument("--runs", type=int, nargs="+", help="numbers of the runs, from 1 (default: all)")
    options = parser.parse_args(argv)
    chosen = [run for number, run in enumerate(RUNS, 1) if not options.runs or number in options.runs]
    counter = PromptCounter(qwen_tokenizer().path)
    print(_line(COLUMNS.split("|")), _line([":--"] * 3 + ["--:"] * 7), sep="\n", flush=True)
    lost = 0
    for run in chosen:
        sessions = _sessions(run, counter)
        first_prompts = {
            session.id: counter.prompt_ids(next(session.prompts()), session.tools) for session in sessions
        }
        result = asyncio.run(_measure(run, sessions, options.speed))
        summary = summarize(result, options.speed)
        print(_row(run, summary, result, first_prompts, options.speed), flush=True)
        lost += summary.lost
    return 1 if lost else 0


def _sessions(run: ValidationRun, counter: PromptCounter) -> list[Session]:
    """The run's sessions, with a limit on the length of every answer."""
    _, sessions = load_source(run.workload)
    chosen = choose(sessions, run.sessions, counter)
    if run.workload == "bfcl":
        return chosen
    outputs = {
        trace.id: [turn.output_tokens for turn in trace.turns] for trace in load_workload(run.workload)
    }
    return [
        session.model_copy(
            update={
                "turns": [
                    turn.model_copy(update={"max_tokens": tokens})
                    for turn, tokens in zip(session.turns, outputs[session.id], strict=True)
                ]
            }
        )
        for session in chosen
    ]


async def _measure(run: ValidationRun, sessions: Sequence[Session], speed: float) -> ReplayResult:
    stack = StackOptions(
        tokenizer=qwen_tokenizer().path,
        policy=run.policy,
        threshold_tokens=THRESHOLD_TOKENS,
        prefix_cache=run.cache,
        speed=speed,
    )
    async with LocalStack(stack) as running:
        # The model's answers are part of the next prompts, so that engines find them in their caches.
        request = ReplayOptions(
            urls=running.urls, model=stack.model, answers="model", extra_body={"ignore_eos": True}
        )
        return await replay(sessions, request, ClosedLoop(run.concurrency))


def _row(
    run: ValidationRun,
    summary: Summary,
    result: ReplayResult,
    first_prompts: Mapping[str, tuple[int, ...]],
    speed: float,
) -> str:
    report = scaled(simulated(run, lengths(result), first_prompts, speed), speed)
    median = summary.session_latency.median if summary.session_latency else float("nan")
    columns = [
        run.workload,
        run.policy,
        run.cache,
        str(run.concurrency),
        f"{summary.wall_seconds:.1f} s",
        f"{report.batch_seconds:.1f} s",
        f"{report.batch_seconds / summary.wall_seconds - 1:+.1%}",
        f"{median:.2f} s",
        f"{report.session_seconds.median:.2f} s",
        f"{report.session_seconds.median / median - 1:+.1%}",
    ]
    return _line(columns)


def _line(columns: Sequence[str]) -> str:
    return f"| {' | '.join(columns)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
