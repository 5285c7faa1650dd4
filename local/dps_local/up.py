"""`dps up`: a local stack that runs until Ctrl-C, before emulated engines, SGLang servers, or ones that run already."""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from dps_engines.launch import ALGORITHMS, EngineError
from dps_engines.pools import PoolName
from dps_gateway.routing.policies import POLICIES
from dps_local.assets import qwen_tokenizer
from dps_local.machine import NoSGLang, sglang_version
from dps_local.processes import ChildError
from dps_local.running_engines import GivenError, served
from dps_local.sglang import SGLangOptions
from dps_local.stack import MODEL, LocalStack, StackOptions, until_signal

PROGRESS_SECONDS = 0.5
PROGRESS_COLUMNS = 80
WATCH_SECONDS = 0.5


@dataclass(frozen=True)
class Engines:
    """The engines that the command line asks for, and what they serve."""

    description: str
    model: str
    tokenizer: Path | str
    urls: dict[PoolName, str] | None = None
    sglang: SGLangOptions | None = None


def parser() -> argparse.ArgumentParser:
    """The command line of `dps up`."""
    result = argparse.ArgumentParser(
        prog="dps up",
        usage="dps up [OPTION ...] [-- SGLANG_ARGUMENT ...]",
        description="Run Redis, a speculative and a greedy engine, and gateways on 127.0.0.1 until Ctrl-C.",
        epilog="What follows -- is added to the command lines of both SGLang servers.",
    )
    result.add_argument("--gateways", type=int, default=1, metavar="N", help="how many replicas (default: 1)")
    result.add_argument("--port", type=int, default=8000, help="of the first gateway; the others follow")
    result.add_argument("--policy", choices=list(POLICIES), default="DeltaPrefill")
    result.add_argument("--threshold", type=int, default=128, metavar="TOKENS", help="τ (default: 128)")
    result.add_argument(
        "--otlp-endpoint", metavar="URL", help="an OTLP/gRPC receiver that traces are sent to"
    )
    result.add_argument(
        "--engine",
        choices=("emulated", "sglang"),
        default="emulated",
        help="what to start (default: emulated)",
    )
    result.add_argument(
        "--model", metavar="NAME", help="the model's name; with --engine sglang, its hub id or folder"
    )
    result.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="default: the model's; of emulated engines Qwen2.5's, or the bundled one",
    )
    given = result.add_argument_group("engines that run already")
    given.add_argument("--speculative-url", type=_base_url, metavar="URL")
    given.add_argument("--greedy-url", type=_base_url, metavar="URL")
    emulated = result.add_argument_group("emulated engines")
    emulated.add_argument("--speed", type=float, default=1.0, help="so much faster than real ones")
    emulated.add_argument(
        "--serialized-speculation", action="store_true", help="the speculative engine takes one at a time"
    )
    sglang = result.add_argument_group(
        "SGLang: one server a pool, each on GPUs of its own if there are enough"
    )
    sglang.add_argument("--draft-model", metavar="NAME", help="hub id or folder; all but Ngram need one")
    sglang.add_argument("--algorithm", choices=ALGORITHMS, default="Standalone", help="default: Standalone")
    sglang.add_argument("--steps", type=int, metavar="N", help="draft steps (default: 3)")
    sglang.add_argument("--top-k", type=int, metavar="N", help="branches of each draft step (default: 1)")
    sglang.add_argument("--draft-tokens", type=int, metavar="N", help="default: steps * top-k + 1; Ngram: 12")
    sglang.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs of each server (default: 1)"
    )
    sglang.add_argument(
        "--engine-python", default=sys.executable, metavar="PYTHON", help="an interpreter that has SGLang"
    )
    return result


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line; one that makes no sense ends the process with status 2, as argparse does."""
    cut = argv.index("--") if "--" in argv else len(argv)
    known = parser()
    arguments = known.parse_args(argv[:cut])
    arguments.engine_arguments = argv[cut + 1 :]
    given = [url is not None for url in (arguments.speculative_url, arguments.greedy_url)]
    sglang = arguments.engine == "sglang"
    if any(given) and not all(given):
        known.error("--speculative-url and --greedy-url go together")
    if any(given) and sglang:
        known.error("--engine starts engines, --speculative-url and --greedy-url name some that run already")
    if sglang and arguments.model is None:
        known.error("--engine sglang needs --model, a hub id or a folder")
    if sglang and arguments.draft_model is None and arguments.algorithm != "Ngram":
        known.error(f"--algorithm {arguments.algorithm} needs --draft-model; pass it, or choose Ngram")
    if arguments.engine_arguments and not sglang:
        known.error("what follows -- is for --engine sglang")
    return arguments


def _base_url(text: str) -> str:
    """The root of a server, given with or without OpenAI's `/v1`."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} is no URL, such as http://127.0.0.1:30000")
    return text.rstrip("/").removesuffix("/v1")


async def _engines(arguments: argparse.Namespace) -> Engines:
    """What to put the gateways before; engines that run are asked what they serve."""
    if arguments.speculative_url is not None:
        urls: dict[PoolName, str] = {
            "speculative": arguments.speculative_url,
            "greedy": arguments.greedy_url,
        }
        found = await served(urls, arguments.model, arguments.tokenizer)
        return Engines("engines: as given", found.model, found.tokenizer, urls=urls)
    if arguments.engine == "sglang":
        version = sglang_version(arguments.engine_python)
        sglang = SGLangOptions(
            model=arguments.model,
            draft_model=arguments.draft_model,
            algorithm=arguments.algorithm,
            steps=arguments.steps,
            top_k=arguments.top_k,
            draft_tokens=arguments.draft_tokens,
            tensor_parallel=arguments.tensor_parallel,
            arguments=arguments.engine_arguments,
            python=arguments.engine_python,
            version=version,
        )
        tokenizer = arguments.tokenizer or arguments.model
        return Engines(f"engines: SGLang {version}", arguments.model, tokenizer, sglang=sglang)
    model = arguments.model or MODEL
    if arguments.tokenizer is not None:
        return Engines("engines: emulated", model, Path(arguments.tokenizer))
    qwen = qwen_tokenizer()
    return Engines(f"engines: emulated; tokenizer: {qwen.description}", model, qwen.path)


async def _up(arguments: argparse.Namespace) -> int:
    engines = await _engines(arguments)
    stack = LocalStack(
        StackOptions(
            tokenizer=engines.tokenizer,
            model=engines.model,
            gateways=arguments.gateways,
            policy=arguments.policy,
            threshold_tokens=arguments.threshold,
            engine_urls=engines.urls,
            sglang=engines.sglang,
            speed=arguments.speed,
            serialized_speculation=arguments.serialized_speculation,
            otlp_endpoint=arguments.otlp_endpoint,
            port=arguments.port,
        )
    )
    print(engines.description)
    for name, placement in stack.placements.items():
        print(f"engine, {name}: {placement}")
    print(f"logs: {stack.folder}", flush=True)
    with Console().status("starting", refresh_per_second=4) as status:
        progress = asyncio.create_task(_tell_progress(stack, status))
        async with stack:
            progress.cancel()
            status.stop()
            _tell(stack)
            await _tell_of_the_dead(stack)
    return 0


async def _tell_progress(stack: LocalStack, status: Status) -> None:
    """Show what the engines say last, on a terminal."""
    began = time.monotonic()
    while True:
        said = {name: engine.last_line() or "loading" for name, engine in stack.engines.items()}
        lines = [f"{name}: {line[:PROGRESS_COLUMNS]}" for name, line in said.items()]
        status.update(escape("\n  ".join([f"starting, {time.monotonic() - began:.0f} s", *lines])))
        await asyncio.sleep(PROGRESS_SECONDS)


async def _tell_of_the_dead(stack: LocalStack) -> None:
    """Say which process has ended, for ever: the others go on, as they would in a cluster."""
    watched = [stack.redis, *stack.engines.values(), *stack.gateways]
    while True:
        for child in [child for child in watched if child.ended]:
            watched.remove(child)
            print(f"{child.name} has ended; its log is {child.log}", flush=True)
        await asyncio.sleep(WATCH_SECONDS)


def _tell(stack: LocalStack) -> None:
    for url, admin in zip(stack.urls, stack.admin_urls, strict=True):
        print(f"gateway: {url} (admin {admin})")
    for name, url in stack.engine_urls.items():
        print(f"engine, {name}: {url}")
    print(f"redis: {stack.redis_url}\nCtrl-C ends it all.", flush=True)


def main(argv: list[str]) -> int:
    """Run `dps up`: 130 or 143 when a signal ended it, 1 when it could not start."""
    arguments = parse(argv)
    try:
        return asyncio.run(until_signal(_up(arguments)))
    except (ChildError, GivenError, NoSGLang, EngineError) as error:
        print(f"dps up: {error}", file=sys.stderr)
        return 1
