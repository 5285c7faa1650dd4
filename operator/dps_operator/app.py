"""`dps operator`: the process that keeps DPSRouters true."""

import argparse
import asyncio
import contextlib
import datetime
import logging
import os
import signal
import socket

import kopf
from aiohttp import web

from dps_operator.cluster import KubernetesCluster
from dps_operator.errors import ClusterError
from dps_operator.handlers import kopf_settings, registry
from dps_operator.health import application
from dps_operator.observe import Observations
from dps_operator.reconcile import Reconciler
from dps_operator.resync import Resync
from dps_operator.settings import DEFAULT_GATEWAY_IMAGE, DEFAULT_REDIS_IMAGE, Settings
from dps_operator.work_queue import WorkQueue

WATCH_RETRY_SECONDS = 5.0
"""Seconds before watching is begun again after it failed as a whole."""

SHUTDOWN_SECONDS = 10.0
"""Seconds that every part has to end in when the operator is told to."""

log = logging.getLogger(__name__)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def run(settings: Settings) -> None:
    """Run until told to stop by SIGTERM or SIGINT."""
    cluster = await KubernetesCluster.connect(settings.request_timeout)
    observations = Observations()
    reconciler = Reconciler(cluster, observations, settings, _now)
    queue = WorkQueue(reconciler.reconcile)
    resync = Resync(cluster, observations, queue, settings)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def install_signal_handlers() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

    install_signal_handlers()
    watching = asyncio.Event()
    server = web.AppRunner(application(queue, resync, watching, settings), shutdown_timeout=1)
    await server.setup()
    await web.TCPSite(server, port=settings.health_port).start()

    # Kopf's name for itself. Left alone it asks for the user's, and a container's user is in no passwd file.
    os.environ.setdefault("POD_ID", socket.gethostname())

    async def watch() -> None:
        """Run Kopf until the kinds that are installed have changed."""
        resync.changed.clear()
        ours = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=registry(observations, queue, resync.installed),
            settings=kopf_settings(settings),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=resync.changed,
            ready_flag=watching,
        )
        # Kopf listens for the end as well, but not while it fails, which takes it seconds.
        install_signal_handlers()
        try:
            await kopf.run_tasks(tasks, ignored=ours)
        finally:
            watching.clear()

    async def watch_forever() -> None:
        # The first pass must know every child, so nothing is watched before everything was listed.
        await resync.complete.wait()
        while True:
            try:
                await watch()
                log.info("watching again: other kinds are installed now")
            except Exception as error:
                # The API server failed while Kopf looked for the kinds to watch, or one of them is gone.
                log.warning("watching failed: %s; again in %.0f s", error, WATCH_RETRY_SECONDS)
                await asyncio.sleep(WATCH_RETRY_SECONDS)
                with contextlib.suppress(ClusterError):
                    await resync.once()

    parts = [asyncio.create_task(resync.run()), asyncio.create_task(watch_forever())]
    parts += [asyncio.create_task(queue.work()) for _ in range(settings.workers)]
    told = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((told, *parts), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            # Kopf cancels what it does not know when it fails. A new process is whole again.
            raise RuntimeError("a part of the operator has ended by itself")
    finally:
        for task in (told, *parts):
            task.cancel()
        _, hanging = await asyncio.wait((told, *parts), timeout=SHUTDOWN_SECONDS)
        for task in hanging:
            log.error("does not end: %r", task)
        await server.cleanup()
        await cluster.close()


def settings_from(arguments: list[str]) -> Settings:
    """The settings of a command line; DPS_OPERATOR_<OPTION> in the environment is the default of each."""

    def told(option: str, otherwise: str) -> str:
        return os.environ.get(f"DPS_OPERATOR_{option}", otherwise)

    parser = argparse.ArgumentParser(prog="dps operator", description="Keep DPSRouters true.")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[name for name in told("NAMESPACES", "").split(",") if name],
        help="watch this namespace only; may be repeated (default: all namespaces)",
    )
    parser.add_argument("--gateway-image", default=told("GATEWAY_IMAGE", DEFAULT_GATEWAY_IMAGE))
    parser.add_argument("--redis-image", default=told("REDIS_IMAGE", DEFAULT_REDIS_IMAGE))
    parser.add_argument("--workers", type=int, default=int(told("WORKERS", "8")))
    parser.add_argument("--resync-seconds", type=float, default=float(told("RESYNC_SECONDS", "600")))
    parser.add_argument("--health-port", type=int, default=int(told("HEALTH_PORT", "8080")))
    parser.add_argument("--verbose", action="store_true", help="tell about every event")
    read = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if read.verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)  # a line for every probe
    # At DEBUG the client writes whole answers to the log, Secrets among them.
    logging.getLogger("kubernetes").setLevel(logging.INFO)
    if not read.verbose:
        logging.getLogger("kopf").setLevel(logging.WARNING)
    return Settings(
        gateway_image=read.gateway_image,
        redis_image=read.redis_image,
        namespaces=tuple(read.namespace),
        workers=read.workers,
        resync_seconds=read.resync_seconds,
        health_port=read.health_port,
    )


def main(arguments: list[str]) -> int:
    """Run `dps operator`; exit status 0 when it was told to stop."""
    asyncio.run(run(settings_from(arguments)))
    return 0
