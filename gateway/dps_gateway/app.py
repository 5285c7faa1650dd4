"""The gateway's wiring: applications, background tasks, and `dps gateway`."""

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import uvloop
from aiohttp import hdrs, web

from dps_gateway.api.admin import admin_app
from dps_gateway.api.call import RUNTIME
from dps_gateway.api.endpoints import ROUTES
from dps_gateway.api.inference import routed
from dps_gateway.api.passthrough import pass_through
from dps_gateway.config import ConfigError, GatewayConfig, load_config
from dps_gateway.pool import Pool
from dps_gateway.prompt.tokenizer import Tokenizer, TokenizerError
from dps_gateway.reload import watch_config
from dps_gateway.runtime import Runtime
from dps_gateway.session.write_behind import write_behind
from dps_gateway.upstream.discovery import ApiServer, watch_service
from dps_gateway.upstream.health import watch_health
from dps_gateway.workers import CANNOT_START, run_workers

log = logging.getLogger(__name__)

GAUGE_SECONDS: Final = 1.0


def public_app(runtime: Runtime) -> web.Application:
    """The application that clients talk to."""
    app = web.Application(client_max_size=runtime.config.limits.max_body_bytes)
    app[RUNTIME] = runtime
    app.on_response_prepare.append(_let_go_if_draining)
    for route in ROUTES:
        app.router.add_post(route.path, routed(route))
    app.router.add_route("*", "/v1/{rest:.*}", pass_through)
    return app


async def _let_go_if_draining(request: web.Request, response: web.StreamResponse) -> None:
    """Answer the last request of a connection while the replica goes away: the next one finds another replica.

    Clients reuse connections, and a load balancer hears late of a replica that is not ready. Who has sent a request
    until then is served.
    """
    if request.app[RUNTIME].draining:
        response.headers[hdrs.CONNECTION] = "close"
        response.force_close()


async def _keep_gauges(runtime: Runtime) -> None:
    """Show this worker's present state for ever: it is another worker that may be asked for everybody's metrics."""
    while True:
        runtime.refresh_gauges()
        await asyncio.sleep(GAUGE_SECONDS)


@asynccontextmanager
async def background(runtime: Runtime, config_file: Path | None = None) -> AsyncIterator[None]:
    """Health checks, discovery, overdue commits and the configuration file, for as long as the gateway runs.

    Raises ConfigError if a service is named and this is not a cluster.
    """
    health = watch_health(
        runtime.pools.values(),
        runtime.engine.health_path,
        lambda: runtime.config.timeouts.health_interval_seconds,
    )
    tasks = [asyncio.create_task(health)]
    if runtime.redis is not None:
        tasks.append(asyncio.create_task(write_behind(runtime.turns.store)))
    followed = [(runtime.config.pools[name].service, runtime.pools[name].set_endpoints) for name in Pool]
    if runtime.peers is not None and runtime.config.session.peers is not None:
        followed.append((runtime.config.session.peers.service, runtime.peers.set_endpoints))
    services = [(service, found) for service, found in followed if service is not None]
    if services:
        api = ApiServer.of_pod()
        tasks += [asyncio.create_task(watch_service(api, service, found)) for service, found in services]
    if runtime.config.listen.workers > 1:
        tasks.append(asyncio.create_task(_keep_gauges(runtime)))
    if config_file is not None:
        tasks.append(asyncio.create_task(watch_config(config_file, runtime)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(
    config: GatewayConfig, tokenizer: Tokenizer, config_file: Path | None, *, reuse_port: bool = False
) -> None:
    """Run one gateway process until SIGTERM or SIGINT, then drain it."""
    runtime = Runtime(config, tokenizer)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    # Handlers are cancelled when their client leaves, and with them the generation upstream.
    public = web.AppRunner(
        public_app(runtime),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=config.timeouts.drain_seconds,
    )
    admin = web.AppRunner(admin_app(runtime), access_log=None)
    await public.setup()
    await admin.setup()
    listen = config.listen
    try:
        async with background(runtime, config_file):
            await web.TCPSite(admin, listen.host, listen.admin_port, reuse_port=reuse_port).start()
            await web.TCPSite(public, listen.host, listen.port, reuse_port=reuse_port, backlog=1024).start()
            log.info("listening on %s:%d, admin on :%d", listen.host, listen.port, listen.admin_port)
            await stop.wait()
            log.info("draining")
            runtime.draining = True
            await asyncio.sleep(runtime.config.timeouts.drain_delay_seconds)
            await public.cleanup()
    finally:
        await public.cleanup()
        await admin.cleanup()
        await runtime.close()


def main(argv: list[str]) -> int:
    """`dps gateway --config FILE`: 0 after a clean stop, 2 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="dps gateway", description="Run the gateway.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the configuration (YAML)")
    parser.add_argument(
        "--check", action="store_true", help="read the configuration, say what is wrong, and stop"
    )
    parser.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    arguments = parser.parse_args(argv)
    _log_to_stderr(arguments.log_level)
    try:
        config = load_config(arguments.config)
        if arguments.check:
            print(f"{arguments.config} can be used")
            return 0
        if config.listen.workers > 1:
            return run_workers(config.listen.workers, _worker, arguments.config, arguments.log_level)
        run_worker(config, arguments.config)
    except (ConfigError, TokenizerError) as error:
        print(f"dps gateway: {error}", file=sys.stderr)
        return CANNOT_START
    return 0


def run_worker(config: GatewayConfig, config_file: Path, *, reuse_port: bool = False) -> None:
    """One gateway process, start to end. Raises ConfigError or TokenizerError before it listens."""
    tokenizer = Tokenizer.load(config.model.tokenizer)
    # The tokenizer's million objects are here to stay: the collector need not walk them again and again.
    gc.collect()
    gc.freeze()
    with suppress(KeyboardInterrupt):
        uvloop.run(serve(config, tokenizer, config_file, reuse_port=reuse_port))


def _worker(config_file: Path, log_level: str) -> None:
    """One of several gateway processes, in a fresh interpreter."""
    _log_to_stderr(log_level)
    try:
        run_worker(load_config(config_file), config_file, reuse_port=True)
    except (ConfigError, TokenizerError) as error:
        print(f"dps gateway: {error}", file=sys.stderr)
        sys.exit(CANNOT_START)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
