"""The gateway process: its applications, its lifecycle, its background tasks, and `dps gateway`."""

import argparse
import asyncio
import ctypes
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

import uvloop
from aiohttp import web
from aiohttp.http import HttpProcessingError

from dps_gateway.api.admin import admin_app
from dps_gateway.api.public import public_app
from dps_gateway.config import ConfigError, ConfigFile, GatewayConfig
from dps_gateway.kubernetes_api import ApiServer, watch_config_map, watch_service
from dps_gateway.pool import Pool
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.prompt.tokenizer_loader import TokenizerError
from dps_gateway.routing.decision import LearningPolicy
from dps_gateway.runtime import Runtime
from dps_gateway.session.store import write_behind
from dps_gateway.shared_learning import keep_synchronized, learned_key
from dps_gateway.telemetry.json_log import flush_periodically
from dps_gateway.telemetry.metrics import Metrics
from dps_gateway.upstream.health import watch_configuration, watch_generation, watch_health, watch_load

log = logging.getLogger(__name__)

GC_THRESHOLD: Final = 10_000
"""Number of new objects after which the garbage collector examines the youngest generation. A request creates hundreds
of objects, almost all of them without cycles; with Python's default of 700, garbage collection takes about 7% of the
CPU time."""

CANNOT_START: Final = 2
"""Exit status if the configuration or the tokenizer cannot be used."""

ADMIN_KEEP_ALIVE_SECONDS: Final = 310.0
"""Time for which an unused connection to the admin port is kept open. Prometheus closes them after five minutes."""

ADMIN_SHUTDOWN_SECONDS: Final = 1.0
"""Time in which requests to the admin port are finished. The streams of the page have no end."""

RESTART_SECONDS: Final = 1.0
"""Time after which a background task that has ended is started again."""

POLL_SECONDS: Final = 1.0
"""Interval at which the configuration's files are checked for changes."""

BACKLOG: Final = 1024
"""Connections to a port that may wait until they are accepted."""

_PROBES: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A connection on which nothing is sent is closed if the client acknowledges neither a probe after 30 s nor three more,
sent every 10 s."""

_MAX_OPTION: Final = 2**31 - 1

Task = Callable[[], Awaitable[None]]


async def serve(config: GatewayConfig, tokenizer: Tokenizer, source: ConfigFile | None) -> None:
    """Run one gateway process until SIGTERM or SIGINT, then drain it."""
    runtime = Runtime(config, tokenizer)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    # When a client disconnects its handler is cancelled, which aborts the generation upstream.
    public = web.AppRunner(
        public_app(runtime),
        handler_cancellation=True,
        access_log=None,
        logger=server_log(),
        keepalive_timeout=config.timeouts.keep_alive_seconds,
        shutdown_timeout=config.timeouts.drain_seconds,
        max_line_size=config.listen.max_header_bytes,
        max_field_size=2 * config.listen.max_header_bytes,  # see _json_errors in api/public.py
    )
    admin = web.AppRunner(
        admin_app(runtime),
        access_log=None,
        logger=server_log(),
        keepalive_timeout=ADMIN_KEEP_ALIVE_SECONDS,
        shutdown_timeout=ADMIN_SHUTDOWN_SECONDS,
    )
    runners = (public, admin)
    for runner in runners:
        await runner.setup()
    listen = config.listen
    try:
        async with background(runtime, source):
            admin_host = listen.admin_address()
            idle_seconds = config.timeouts.idle_seconds
            for each in listening_sockets(admin_host, listen.admin_port, idle_seconds):
                await web.SockSite(admin, each).start()
            # Several gateways on one host can share the public port.
            for each in listening_sockets(listen.host, listen.port, idle_seconds, reuse_port=True):
                await web.SockSite(public, each, ssl_context=runtime.tls, backlog=BACKLOG).start()
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


def listening_sockets(
    host: str, port: int, idle_seconds: float, *, reuse_port: bool = False
) -> list[socket.socket]:
    """Sockets that listen on all addresses of `host`. Raises OSError.

    idle_seconds: the time after which a client is lost that acknowledges nothing. Without it, an engine would go on
    generating for such a client, until the buffers of the connection are full or, on Linux, for a quarter of an hour.
    reuse_port: whether other processes may listen on the port as well.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # Linux copies these options to the connections that the sockets accept.
    options = {**_PROBES, "TCP_USER_TIMEOUT": round(min(1000 * idle_seconds, _MAX_OPTION))}
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            listening = socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=reuse_port)
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                if (option := getattr(socket, name, None)) is not None:  # not on every system
                    with suppress(OSError):
                        listening.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError:
        for listening in sockets:
            listening.close()
        raise
    return sockets


class _WithoutContent(logging.Filter):
    """Removes the malformed part of a request, which aiohttp quotes, from the log: it may be an API key."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "malformed request: %s", (type(error).__name__,)
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def server_log() -> logging.Logger:
    """The logger of an HTTP server."""
    log = logging.getLogger("dps_gateway.http")
    if not log.filters:
        log.addFilter(_WithoutContent())
    return log


@asynccontextmanager
async def background(runtime: Runtime, source: ConfigFile | None = None) -> AsyncIterator[None]:
    """Run health checks, discovery, write-behind and the configuration watch for as long as the context is open.

    Raises ConfigError if the configuration names a Service and the gateway does not run in a cluster.
    """
    supervisors = [
        asyncio.create_task(supervise(name, task, runtime.metrics))
        for name, task in _tasks(runtime, source).items()
    ]
    try:
        yield
    finally:
        for supervisor in supervisors:
            supervisor.cancel()
        await asyncio.gather(*supervisors, return_exceptions=True)


async def supervise(
    name: str, task: Task, metrics: Metrics, restart_seconds: float = RESTART_SECONDS
) -> None:
    """Run a task that should never end, and restart it whenever it does. Every failure is logged and counted."""
    while True:
        try:
            await task()
            log.error("background task '%s' ended; restarting it", name)
        except asyncio.CancelledError:
            if (own := asyncio.current_task()) is not None and own.cancelling():
                raise
            log.error("background task '%s' was cancelled; restarting it", name)
        except Exception:
            log.exception("background task '%s' failed; restarting it", name)
        metrics.background_failures.labels(name).inc()
        await asyncio.sleep(restart_seconds)


def _tasks(runtime: Runtime, source: ConfigFile | None) -> dict[str, Task]:
    """The tasks that this configuration requires, keyed by their names in logs and metrics."""
    pools, engine = runtime.pools.values(), runtime.engine

    def interval_seconds() -> float:
        return runtime.config.timeouts.health_interval_seconds

    def silent_seconds() -> float:
        return runtime.config.timeouts.silent_seconds

    tasks: dict[str, Task] = {
        "health": partial(watch_health, pools, engine.health_path, interval_seconds),
        "generation": partial(
            watch_generation, pools, engine.generation_path, interval_seconds, silent_seconds
        ),
        "engine-load": partial(
            watch_load,
            pools,
            engine.load_path,
            engine.load_of,
            lambda: isinstance(runtime.policy, LearningPolicy),
        ),
        "engine-configuration": partial(
            watch_configuration, pools, engine.configuration_path, engine.configuration_of
        ),
    }
    if runtime.redis is not None:
        tasks["write-behind"] = lambda: write_behind(runtime.turns.store)
        tasks["learning"] = lambda: keep_synchronized(
            runtime.learning, lambda: runtime.policy, lambda: learned_key(runtime.config)
        )
    if (decisions := runtime.decision_log) is not None:
        tasks["decision-log"] = lambda: flush_periodically(decisions)
    if (accesses := runtime.access_log) is not None:
        tasks["access-log"] = lambda: flush_periodically(accesses)
    services = {name: service for name in Pool if (service := runtime.config.pools[name].service) is not None}
    if services:
        api = ApiServer.of_pod()
        for name, service in services.items():
            found = runtime.pools[name].set_endpoints
            tasks[f"discovery-{name.value}"] = partial(watch_service, api, service, found)
    if source is not None:
        tasks["config"] = partial(watch_config, source, runtime)
        if (config_map := runtime.config.config_map) is not None:
            received = partial(receive_config, source=source, runtime=runtime)
            tasks["config-map"] = partial(watch_config_map, ApiServer.of_pod(), config_map, received)
    return tasks


async def watch_config(source: ConfigFile, runtime: Runtime) -> None:
    """Poll the files and reload the configuration when one of them changes, until cancelled."""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if source.changed():
            runtime.reload(source)


def receive_config(text: str, source: ConfigFile, runtime: Runtime) -> None:
    """Reload the configuration from the content of its ConfigMap, unless it is the one in use."""
    if source.receive(text):
        runtime.reload(source)


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
    logging.basicConfig(
        level=arguments.log_level,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
    try:
        source = ConfigFile(arguments.config)
        config = source.load()
        if arguments.check:
            print(f"{arguments.config} is valid")
            return 0
        run_gateway(config, source)
    except (ConfigError, TokenizerError) as error:
        print(f"dps gateway: {error}", file=sys.stderr)
        return CANNOT_START
    return 0


def run_gateway(config: GatewayConfig, source: ConfigFile) -> None:
    """Run one gateway process until it is stopped. Raises ConfigError or TokenizerError before it listens."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    tokenizer = Tokenizer.load(config.model.tokenizer, config.model.revision)
    # Modules and the tokenizer are never freed; exclude their objects from garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    _return_freed_memory()
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(config, tokenizer, source))


def _return_freed_memory() -> None:
    """Return the memory that was needed only for loading, about 70 MiB, to the operating system.

    glibc would keep it. Other C libraries do not have this function.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
