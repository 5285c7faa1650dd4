"""`dps replay`: replay recorded sessions against an OpenAI-compatible server."""

import argparse
import asyncio
import json
import secrets
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from dps_lab.arguments import positive_float, positive_int
from dps_lab.replay.client import ReplayOptions
from dps_lab.replay.records import ReplayResult
from dps_lab.replay.report import print_summary
from dps_lab.replay.run import replay
from dps_lab.replay.source import NAMED_SOURCES, load_source
from dps_lab.workload.sessions import Session, SessionFormatError


def parser() -> argparse.ArgumentParser:
    """The parser of `dps replay`."""
    result = argparse.ArgumentParser(
        prog="dps replay",
        description="Send recorded sessions to an OpenAI-compatible server and report decisions and latencies.",
    )
    result.add_argument(
        "urls",
        nargs="+",
        metavar="URL",
        help="base URL (http://HOST:PORT/v1); if there are several, turns are sent to them in rotation",
    )
    result.add_argument(
        "--sessions",
        default="bfcl",
        metavar="NAME|FILE",
        help=f"{', '.join(NAMED_SOURCES)}, or a JSONL file in the format of docs/lab.md (default: bfcl)",
    )
    result.add_argument("--limit", type=positive_int, metavar="N", help="replay only the first N sessions")
    result.add_argument(
        "--model",
        metavar="NAME",
        default="Qwen/Qwen2.5-7B-Instruct",
        help="model name in the requests (default: Qwen/Qwen2.5-7B-Instruct)",
    )
    loop = result.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency",
        type=positive_int,
        default=8,
        metavar="N",
        help="closed loop: N concurrent sessions (default: 8)",
    )
    loop.add_argument(
        "--rate",
        type=positive_float,
        metavar="R",
        help="open loop: sessions arrive as a Poisson process with R per second",
    )
    result.add_argument("--seed", type=int, default=0, help="seed of the open loop's arrivals (default: 0)")
    result.add_argument(
        "--answers",
        choices=["recorded", "model"],
        default="recorded",
        help="which answers become part of the history (default: recorded)",
    )
    result.add_argument(
        "--session-ids",
        choices=["header", "none"],
        default="header",
        help="whether to send session ids in the header x-session-id (default: header)",
    )
    result.add_argument(
        "--max-tokens",
        type=positive_int,
        metavar="N",
        help="max_tokens of turns for which the sessions do not set it",
    )
    result.add_argument("--no-stream", action="store_true", help="request complete answers, not streams")
    result.add_argument("--api-key", metavar="KEY", help="send this key as a bearer token")
    result.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="fields to add to every request body"
    )
    result.add_argument(
        "--json", type=Path, metavar="FILE", help="write the records of all turns to this file"
    )
    return result


def main(argv: list[str]) -> int:
    """Run `dps replay`. Returns 0 if every turn was answered, 1 if some were lost, 2 if the input is invalid."""
    arguments = parser().parse_args(argv)
    with ExitStack() as files:
        try:
            name, sessions = load_source(arguments.sessions)
            # The file is opened before the replay, so that no records are lost because it cannot be written.
            records = None if arguments.json is None else files.enter_context(arguments.json.open("w"))
        except (OSError, SessionFormatError) as error:
            print(f"dps replay: {error}", file=sys.stderr)
            return 2
        console = Console()
        console.print(f"sessions: {name}", markup=False, highlight=False)
        result = asyncio.run(_replay(sessions[: arguments.limit], arguments, console))
        if records is not None:
            json.dump(asdict(result), records, indent=1)
    return _report(result, console)


def _report(result: ReplayResult, console: Console) -> int:
    """Print the tables of a replay and its first lost turns. Returns 1 if turns were lost, or 0."""
    print_summary(result, console)
    for record in [record for record in result.turns if record.error is not None][:5]:
        console.print(f"lost: {record.session}, turn {record.turn}: {record.error}", markup=False)
    return 1 if result.lost else 0


async def _replay(sessions: list[Session], arguments: argparse.Namespace, console: Console) -> ReplayResult:
    options = ReplayOptions(
        urls=arguments.urls,
        model=arguments.model,
        stream=not arguments.no_stream,
        answers=arguments.answers,
        session_ids=arguments.session_ids,
        run=f"{secrets.token_hex(4)}-",
        max_tokens=arguments.max_tokens,
        extra_body=arguments.extra_body,
        api_key=arguments.api_key,
    )
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("turns", total=sum(len(session.turns) for session in sessions))
        return await replay(
            sessions,
            options,
            concurrency=arguments.concurrency,
            rate=arguments.rate,
            seed=arguments.seed,
            on_turn=lambda record: progress.advance(task),
        )


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value
