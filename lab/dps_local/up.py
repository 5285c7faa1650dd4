"""`dps up`: run a local stack until Ctrl-C, with emulated engines, SGLang servers, or engines that already run."""

import argparse
import asyncio
import sys
from dataclasses import replace

from dps_engines.launch import EngineError
from dps_engines.pools import PoolName
from dps_gateway.routing.policies import POLICIES
from dps_local.assets import qwen_tokenizer
from dps_local.machine import SGLangNotFound, check_mooncake, sglang_version
from dps_local.processes import ChildError, next_free_ports
from dps_local.running_engines import RunningEngineError, base_url, served_model
from dps_local.sglang import SGLANG, SGLangOptions
from dps_local.stack import MODEL, LocalStack, StackOptions, until_signal

PORT = 8000
ADMIN_PORT = 9090
"""The first gateway's ports, unless they are taken. `dps top` reads the latter."""

WATCH_SECONDS = 0.5


def parser() -> argparse.ArgumentParser:
    """The parser of `dps up`."""
    result = argparse.ArgumentParser(
        prog="dps up",
        usage="dps up [OPTION ...] [-- SGLANG_ARGUMENT ...]",
        description="Run Redis, a speculative and a greedy engine, and gateways on 127.0.0.1 until Ctrl-C.",
        epilog="Arguments after -- are appended to the command lines of both SGLang servers.",
    )
    result.add_argument(
        "--gateways", type=int, default=1, metavar="N", help="number of gateway replicas (default: 1)"
    )
    result.add_argument(
        "--port",
        type=int,
        help=f"port of the first gateway; the others use the following ports (default: {PORT}, or the next free one)",
    )
    result.add_argument(
        "--policy",
        choices=list(POLICIES),
        default="DeltaPrefill",
        help="routing policy (default: DeltaPrefill)",
    )
    result.add_argument(
        "--threshold", type=int, default=128, metavar="TOKENS", help="the policy's threshold τ (default: 128)"
    )
    result.add_argument("--otlp-endpoint", metavar="URL", help="send traces to this OTLP/gRPC receiver")
    result.add_argument(
        "--prefix-cache",
        choices=("separate", "common"),
        default="separate",
        help="whether the engines that dps up starts share cached prefixes (default: separate)",
    )
    result.add_argument(
        "--engine",
        choices=("emulated", "sglang"),
        default="emulated",
        help="which engines to start (default: emulated)",
    )
    result.add_argument(
        "--model", metavar="NAME", help="served model name; with --engine sglang, a Hub id or folder"
    )
    result.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder of the tokenizer that the gateway counts tokens with (default: that of the model; for emulated "
        "engines that of Qwen2.5, or a bundled one if it cannot be downloaded)",
    )
    running = result.add_argument_group(
        "running engines", "Use engines that are already running instead of starting engines."
    )
    running.add_argument(
        "--speculative-url", type=base_url, metavar="URL", help="base URL of the speculative engine"
    )
    running.add_argument("--greedy-url", type=base_url, metavar="URL", help="base URL of the greedy engine")
    emulated = result.add_argument_group("emulated engines")
    emulated.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="emulated seconds per real second (default: 1)",
    )
    emulated.add_argument(
        "--serialized-speculation",
        action="store_true",
        help="the speculative engine processes one request at a time",
    )
    sglang = result.add_argument_group(
        "SGLang", "One server per pool, on separate GPUs if there are enough, otherwise on shared ones."
    )
    sglang.add_argument(
        "--draft-model", metavar="NAME", help="Hub id or folder; required by all algorithms except Ngram"
    )
    sglang.add_argument(
        "--algorithm",
        choices=SGLANG.algorithms,
        default="Standalone",
        help="algorithm of speculative decoding (default: Standalone)",
    )
    sglang.add_argument(
        "--steps", type=int, metavar="N", help="draft steps per verification step (default: 3)"
    )
    sglang.add_argument("--top-k", type=int, metavar="N", help="branches per draft step (default: 1)")
    sglang.add_argument(
        "--draft-tokens",
        type=int,
        metavar="N",
        help="tokens verified per verification step (default: steps * top-k + 1, or 12 for Ngram)",
    )
    sglang.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model on the Hub (default: its default branch)",
    )
    sglang.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="GPUs per server (default: 1)"
    )
    sglang.add_argument(
        "--engine-python",
        default=sys.executable,
        metavar="PYTHON",
        help="interpreter that has SGLang installed (default: the one that runs dps)",
    )
    return result


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Exits with status 2 if options are invalid or contradict each other."""
    cut = argv.index("--") if "--" in argv else len(argv)
    known = parser()
    arguments = known.parse_args(argv[:cut])
    arguments.engine_arguments = argv[cut + 1 :]
    running = [url is not None for url in (arguments.speculative_url, arguments.greedy_url)]
    sglang = arguments.engine == "sglang"
    if any(running) and not all(running):
        known.error("--speculative-url and --greedy-url must be used together")
    if any(running) and arguments.prefix_cache == "common":
        known.error("--prefix-cache common cannot be combined with --speculative-url and --greedy-url")
    if any(running) and sglang:
        known.error("--engine sglang cannot be combined with --speculative-url and --greedy-url")
    if sglang and arguments.model is None:
        known.error("--engine sglang requires --model, a Hub id or folder")
    if sglang and arguments.draft_model is None and arguments.algorithm != "Ngram":
        known.error(f"--algorithm {arguments.algorithm} requires --draft-model; only Ngram works without one")
    if arguments.engine_arguments and not sglang:
        known.error("arguments after -- require --engine sglang")
    return arguments


async def _options(arguments: argparse.Namespace) -> tuple[str, StackOptions]:
    """A description of the engines, and the options of the stack.

    Raises RunningEngineError or SGLangNotFound if the engines cannot be used.
    """
    options = StackOptions(
        tokenizer=arguments.tokenizer or "",
        model=arguments.model or MODEL,
        gateways=arguments.gateways,
        policy=arguments.policy,
        threshold_tokens=arguments.threshold,
        prefix_cache=arguments.prefix_cache,
        speed=arguments.speed,
        serialized_speculation=arguments.serialized_speculation,
        otlp_endpoint=arguments.otlp_endpoint,
        port=arguments.port if arguments.port is not None else next_free_ports(PORT, arguments.gateways),
        admin_port=next_free_ports(ADMIN_PORT, arguments.gateways),
    )
    if arguments.speculative_url is not None:
        urls: dict[PoolName, str] = {
            "speculative": arguments.speculative_url,
            "greedy": arguments.greedy_url,
        }
        served = await served_model(urls, arguments.model, arguments.tokenizer)
        found = replace(options, model=served.model, tokenizer=served.tokenizer, engine_urls=urls)
        return "already running", found
    if arguments.engine == "sglang":
        version = sglang_version(arguments.engine_python)
        if arguments.prefix_cache == "common":
            check_mooncake(arguments.engine_python)
        sglang = SGLangOptions(
            model=arguments.model,
            draft_model=arguments.draft_model,
            algorithm=arguments.algorithm,
            steps=arguments.steps,
            top_k=arguments.top_k,
            draft_tokens=arguments.draft_tokens,
            tensor_parallel=arguments.tensor_parallel,
            tokenizer=arguments.tokenizer,
            revision=arguments.revision,
            arguments=arguments.engine_arguments,
            python=arguments.engine_python,
            version=version,
        )
        tokenizer = arguments.tokenizer or arguments.model
        return f"SGLang {version}", replace(options, tokenizer=tokenizer, sglang=sglang)
    if arguments.tokenizer is not None:
        return "emulated", options
    qwen = qwen_tokenizer()
    return f"emulated; tokenizer: {qwen.description}", replace(options, tokenizer=qwen.path)


async def _up(arguments: argparse.Namespace) -> int:
    engines, options = await _options(arguments)
    stack = LocalStack(options)
    print(f"engines: {engines}")
    for name, placement in stack.placements.items():
        print(f"{name} engine: {placement}")
    print(f"starting; logs: {stack.folder}", flush=True)
    async with stack:
        _print_urls(stack)
        await _report_exits(stack)
    return 0


async def _report_exits(stack: LocalStack) -> None:
    """Report every process that exits. The other processes keep running, as they would in a cluster."""
    watched = [stack.redis, *stack.engines.values(), *stack.gateways]
    if stack.mooncake is not None:
        watched.append(stack.mooncake)
    while True:
        for child in [child for child in watched if child.ended]:
            watched.remove(child)
            print(f"{child.name} has exited; see its log: {child.log}", flush=True)
        await asyncio.sleep(WATCH_SECONDS)


def _print_urls(stack: LocalStack) -> None:
    for url, admin in zip(stack.urls, stack.admin_urls, strict=True):
        print(f"gateway: {url} (admin: {admin})")
    page, *others = stack.admin_urls
    query = f"?gateways={','.join(others)}" if others else ""
    print(f"decisions, live: {page}/{query}")
    for name, url in stack.engine_urls.items():
        print(f"{name} engine: {url}")
    found = "" if stack.admin_urls == [f"http://127.0.0.1:{ADMIN_PORT}"] else f" {' '.join(stack.admin_urls)}"
    print(f"redis: {stack.redis_url}\nload: dps top{found}\nPress Ctrl-C to stop.", flush=True)


def main(argv: list[str]) -> int:
    """Run `dps up`. Returns 130 or 143 after SIGINT or SIGTERM, or 1 if the stack could not start."""
    arguments = parse(argv)
    try:
        return asyncio.run(until_signal(_up(arguments)))
    except (ChildError, RunningEngineError, SGLangNotFound, EngineError) as error:
        print(f"dps up: {error}", file=sys.stderr)
        return 1
