"""`dps operator`: the operator process, its HTTP endpoints and its tasks."""

import asyncio
import datetime
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import aiohttp
import kopf
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

from dps_operator.autoscale import Autoscaler
from dps_operator.cache_health import CacheWatch
from dps_operator.kube import Cluster
from dps_operator.lease import Leadership
from dps_operator.metrics import MetricsReader
from dps_operator.mounts import MountWatch
from dps_operator.objects import Key
from dps_operator.observe import Observations
from dps_operator.reconcile import Reconciler
from dps_operator.settings import Settings, parse_options
from dps_operator.watch import Resync, kopf_settings, registry
from dps_operator.work_queue import WorkQueue

OLDEST = Gauge("dps_operator_oldest_pass_seconds", "Age of the oldest running reconcile")


def stuck_reason(queue: WorkQueue, resync: Resync, settings: Settings) -> str:
    """Why the operator should be restarted; empty if it should not. An unavailable API server is not a reason."""
    if queue.oldest_age() > settings.stuck_after:
        return f"a reconcile has been running for {queue.oldest_age():.0f} s"
    overdue = time.monotonic() - resync.alive - settings.resync_seconds
    if overdue > settings.stuck_after:
        return f"the listing is overdue by {overdue:.0f} s"
    return ""


def application(
    queue: WorkQueue, resync: Resync, leading: asyncio.Event, settings: Settings
) -> web.Application:
    """The endpoints of an operator process.

    leading: set once this replica reconciles; until then it is ready, because another one does.
    """

    async def healthz(_: web.Request) -> web.Response:
        why = stuck_reason(queue, resync, settings) if leading.is_set() else ""
        return web.Response(text=why or "ok", status=500 if why else 200)

    async def readyz(_: web.Request) -> web.Response:
        ready = resync.complete.is_set() or not leading.is_set()
        return web.Response(
            text="ok" if ready else "the first listing is not complete", status=200 if ready else 503
        )

    async def metrics(_: web.Request) -> web.Response:
        OLDEST.set(queue.oldest_age())
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    return app


SHUTDOWN_SECONDS = 10.0
"""Time limit for tasks to finish at shutdown, in seconds."""

Task = Callable[[], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)


class Background:
    """The HTTP endpoints, the Lease, and the tasks that run once this replica leads."""

    def __init__(
        self,
        leadership: Leadership,
        tasks: Sequence[Task],
        endpoints: web.Application,
        port: int,
        stop: asyncio.Event,
    ) -> None:
        """stop: set when a task has failed or the Lease is lost, so that the process ends."""
        self._leadership = leadership
        self._tasks = tasks
        self._server = web.AppRunner(endpoints, shutdown_timeout=1)
        self._port = port
        self._stop = stop
        self.failed = False
        """Whether a task has failed or the Lease was lost."""

    async def start(self) -> None:
        """Serve the endpoints, and start the tasks."""
        await self._server.setup()
        await web.TCPSite(self._server, port=self._port).start()
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._leadership.run())
                await self._leadership.leading.wait()
                for task in self._tasks:
                    group.create_task(task())
        except ExceptionGroup as errors:
            self.failed = True
            for error in errors.exceptions:
                log.error("the operator stops: %s", error, exc_info=error)
            self._stop.set()

    async def end(self) -> None:
        """Cancel the tasks, give up the Lease, and close the endpoints."""
        self._running.cancel()
        _, hanging = await asyncio.wait([self._running], timeout=SHUTDOWN_SECONDS)
        if hanging:
            log.error("tasks did not stop within %.0f s", SHUTDOWN_SECONDS)
        await self._leadership.release()
        await self._server.cleanup()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises RuntimeError if a task failed, so that the kubelet restarts the process."""
    # Kopf identifies this process by POD_ID. By default it looks up the user name, which fails in a container whose
    # user has no passwd entry.
    os.environ.setdefault("POD_ID", socket.gethostname())
    stop = asyncio.Event()
    async with Cluster.connect(settings.request_timeout) as cluster, aiohttp.ClientSession() as http:
        leadership = Leadership(cluster, settings.lease)
        observations, metrics = Observations(), MetricsReader(http)
        reconciler = Reconciler(cluster, observations, settings, _now)
        queue = WorkQueue(reconciler.reconcile)
        resync = Resync(cluster, observations, queue, settings)
        autoscaler = Autoscaler(observations, queue, metrics, _now)
        tasks: list[Task] = [
            autoscaler.run,
            partial(CacheWatch(observations, metrics).run, queue),
            partial(MountWatch(cluster, observations).run, queue),
            *[queue.work] * settings.workers,
        ]
        # A reconcile requires all children in the cache, and so do the loops that read it.
        listed = [partial(resync.once_listed, task) for task in tasks]
        endpoints = application(queue, resync, leadership.leading, settings)
        background = Background(leadership, [resync.run, *listed], endpoints, settings.health_port, stop)

        def enqueue(key: Key) -> None:
            # The first listing of a replica that begins to lead enqueues every DPSRouter.
            if leadership.leading.is_set():
                queue.add(key)

        await kopf.operator(
            registry=registry(observations, enqueue, background.start, background.end),
            settings=kopf_settings(settings),
            standalone=True,
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            stop_flag=stop,
        )
        if background.failed:
            raise RuntimeError("a task of the operator failed")


def main(arguments: list[str]) -> int:
    """Run `dps operator`; returns 0 after SIGTERM or SIGINT."""
    settings = parse_options(arguments)
    logging.basicConfig(
        level=logging.DEBUG if settings.verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
    )
    # The access log has a line for every probe.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    # At DEBUG the client logs response bodies, which include Secrets.
    logging.getLogger("kubernetes").setLevel(logging.INFO)
    if not settings.verbose:
        logging.getLogger("kopf").setLevel(logging.WARNING)
    asyncio.run(run(settings))
    return 0
