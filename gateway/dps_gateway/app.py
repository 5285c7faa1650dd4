"""The gateway process: its applications, its lifecycle, and `dps gateway`."""

import argparse
import asyncio
import ctypes
import gc
import logging
import multiprocessing
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import uvloop
from aiohttp import web

from dps_gateway.api.admin import admin_app, worker_app
from dps_gateway.api.listener import Site
from dps_gateway.api.public import public_app
from dps_gateway.api.server import Runner
from dps_gateway.background import background
from dps_gateway.client_connections import raise_file_limit
from dps_gateway.config import ConfigError, GatewayConfig
from dps_gateway.prompt.description import TokenizerError
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.reload import Source
from dps_gateway.runtime import Runtime
from dps_gateway.workers import CANNOT_START, own_socket, run_workers

log = logging.getLogger(__name__)

GC_THRESHOLD: Final = 10_000
"""Number of new objects after which the garbage collector examines the youngest generation. A request creates hundreds
of objects, almost all of them without cycles; with Python's default of 700, garbage collection takes about 7% of the
CPU time."""

BACKLOG: Final = 1024
"""Connections to a port that may wait until they are accepted."""


async def serve(
    config: GatewayConfig, tokenizer: Tokenizer, source: Source | None, *, reuse_port: bool = False
) -> None:
    """Run one gateway process until SIGTERM or SIGINT, then drain it."""
    worker_socket = own_socket()
    runtime = Runtime(config, tokenizer, worker_socket)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    _stop_with_parent(loop, stop)
    # When a client disconnects its handler is cancelled, which aborts the generation upstream.
    public = Runner(
        public_app(runtime),
        clients=runtime.clients,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=config.timeouts.drain_seconds,
    )
    admin = Runner(
        admin_app(runtime),
        clients=runtime.admin_clients,
        full="the admin port has too many connections",
        access_log=None,
    )
    workers = Runner(worker_app(runtime), access_log=None)
    runners = (public, admin, workers)
    for runner in runners:
        await runner.setup()
    listen = config.listen
    try:
        if worker_socket is not None:
            await web.UnixSite(workers, str(worker_socket)).start()
        async with background(runtime, source):
            admin_host = listen.admin_address()
            await Site(
                admin,
                admin_host,
                listen.admin_port,
                backlog=BACKLOG,
                reuse_port=reuse_port,
                burst=lambda: runtime.admin_clients.burst,
                idle_seconds=lambda: runtime.config.timeouts.idle_seconds,
            ).start()
            tls = runtime.tls.context if runtime.tls is not None else None
            await Site(
                public,
                listen.host,
                listen.port,
                backlog=BACKLOG,
                reuse_port=reuse_port,
                tls=tls,
                burst=lambda: runtime.clients.burst,
                idle_seconds=lambda: runtime.config.timeouts.idle_seconds,
            ).start()
            log.info(
                "listening on %s:%d, admin on %s:%d", listen.host, listen.port, admin_host, listen.admin_port
            )
            await stop.wait()
            log.info("draining")
            runtime.draining = True
            await asyncio.sleep(runtime.config.timeouts.drain_delay_seconds)
            await public.cleanup()
    finally:
        for runner in runners:
            await runner.cleanup()
        await runtime.close()


def _stop_with_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Stop a worker when its parent has died, even by SIGKILL, because nothing else would stop or replace it."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = int(parent.sentinel)

    def parent_died() -> None:
        loop.remove_reader(sentinel)
        log.error("the parent process has died")
        stop.set()

    loop.add_reader(sentinel, parent_died)


def main(argv: list[str]) -> int:
    """`dps gateway --config FILE`. Exit status: 0 after a clean stop, 2 if the configuration cannot be used."""
    parser = argparse.ArgumentParser(prog="dps gateway", description="Run the gateway.")
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="configuration file (YAML)"
    )
    parser.add_argument("--check", action="store_true", help="validate the configuration and exit")
    parser.add_argument(
        "--log-level",
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        help="least severity of the messages that are logged (default: INFO)",
    )
    arguments = parser.parse_args(argv)
    _log_to_stderr(arguments.log_level)
    try:
        source = Source(arguments.config)
        config = source.load()
        if arguments.check:
            print(f"{arguments.config} is valid")
            return 0
        if config.listen.workers > 1:
            return run_workers(config.listen.workers, _worker, arguments.config, arguments.log_level)
        run_worker(config, source)
    except (ConfigError, TokenizerError) as error:
        print(f"dps gateway: {error}", file=sys.stderr)
        return CANNOT_START
    return 0


def run_worker(config: GatewayConfig, source: Source, *, reuse_port: bool = False) -> None:
    """Run one gateway process until it is stopped. Raises ConfigError or TokenizerError before it listens."""
    raise_file_limit()
    tokenizer = Tokenizer.load(config.model.tokenizer, config.model.revision)
    # Modules and the tokenizer are never freed; exclude their objects from garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    _return_freed_memory()
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(config, tokenizer, source, reuse_port=reuse_port))


def _return_freed_memory() -> None:
    """Return the memory that was needed only for loading, about 70 MiB, to the operating system.

    glibc would keep it. Other C libraries do not have this function.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _worker(config_file: Path, log_level: str) -> None:
    """Run one of several gateway processes, in a new interpreter."""
    _log_to_stderr(log_level)
    try:
        source = Source(config_file)
        run_worker(source.load(), source, reuse_port=True)
    except (ConfigError, TokenizerError) as error:
        print(f"dps gateway: {error}", file=sys.stderr)
        sys.exit(CANNOT_START)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
