"""`dps operator`: the operator process."""

import asyncio
import datetime
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from dps_operator.cluster import KubernetesCluster
from dps_operator.gateway_metrics import GatewayMetrics
from dps_operator.gpu_budget.balancer import Allocations, Balancer
from dps_operator.gpu_budget.demand import GatewayDemand
from dps_operator.health import application
from dps_operator.leader import Leadership
from dps_operator.model_hub import ModelHub
from dps_operator.mounts import MountWatch
from dps_operator.observe import Observations
from dps_operator.options import parse_options
from dps_operator.prefix_cache.engine_metrics import EngineMetrics
from dps_operator.prefix_cache.watch import CacheWatch
from dps_operator.reconcile import Reconciler
from dps_operator.resync import Resync
from dps_operator.scale_to_zero.scaler import GatewayActivity, IdlePools, Scaler
from dps_operator.settings import Settings
from dps_operator.watches import Watches
from dps_operator.work_queue import WorkQueue

SHUTDOWN_SECONDS = 10.0
"""Time limit for tasks to finish at shutdown, in seconds."""

Task = Callable[[], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT. Raises RuntimeError if a task ends, so that the kubelet restarts the process."""
    stop = asyncio.Event()
    _install_signal_handlers(stop)
    # Kopf identifies this process by POD_ID. By default it looks up the user name, which fails in a container whose
    # user has no passwd entry.
    os.environ.setdefault("POD_ID", socket.gethostname())

    cluster = await KubernetesCluster.connect(settings.request_timeout)
    http = aiohttp.ClientSession()
    # The Hub may be reachable only through a proxy; pods never are.
    hub = aiohttp.ClientSession(trust_env=True)
    leadership = Leadership.of(cluster, settings.lease)

    observations, metrics = Observations(), GatewayMetrics(http)
    allocations, idle_pools = Allocations(), IdlePools()
    caches = CacheWatch(observations, metrics, EngineMetrics(http))
    mounts = MountWatch(cluster, observations)
    read_size = ModelHub(hub, settings.hub_endpoint).size if settings.hub_endpoint else None
    reconciler = Reconciler(
        cluster, observations, settings, _now, allocations, caches.health, idle_pools, read_size
    )
    queue = WorkQueue(reconciler.reconcile)
    resync = Resync(cluster, observations, queue, settings)
    watches = Watches(observations, queue, resync, settings, partial(_install_signal_handlers, stop))
    balancer = Balancer(observations, queue, GatewayDemand(metrics), allocations, _now)
    scaler = Scaler(observations, queue, GatewayActivity(metrics), idle_pools)

    endpoints = application(queue, resync, leadership.leading, watches.established, settings)
    server = web.AppRunner(endpoints, shutdown_timeout=1)
    await server.setup()
    await web.TCPSite(server, port=settings.health_port).start()
    tasks: list[Task] = [
        resync.run,
        watches.run,
        balancer.run,
        scaler.run,
        partial(caches.run, queue),
        partial(mounts.run, queue),
        *[queue.work] * settings.workers,
    ]
    try:
        await _run_until(stop, [leadership.run, *(partial(leadership.once_leading, task) for task in tasks)])
    finally:
        await leadership.release()
        await server.cleanup()
        await http.close()
        await hub.close()
        await cluster.close()


def _install_signal_handlers(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _run_until(stop: asyncio.Event, functions: Sequence[Task]) -> None:
    """Run the functions concurrently, and cancel them when `stop` is set. Raises RuntimeError if one ends before."""
    tasks = [asyncio.create_task(function()) for function in functions]
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((stopped, *tasks), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            raise RuntimeError("a task of the operator ended unexpectedly")
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        _, hanging = await asyncio.wait((stopped, *tasks), timeout=SHUTDOWN_SECONDS)
        for task in hanging:
            log.error("task did not stop: %r", task)


def _configure_logging(*, verbose: bool) -> None:
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
    )
    # The access log has a line for every probe.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    # At DEBUG the client logs response bodies, which include Secrets.
    logging.getLogger("kubernetes").setLevel(logging.INFO)
    if not verbose:
        logging.getLogger("kopf").setLevel(logging.WARNING)


def main(arguments: list[str]) -> int:
    """Run `dps operator`; returns 0 after SIGTERM or SIGINT."""
    options = parse_options(arguments)
    _configure_logging(verbose=options.verbose)
    asyncio.run(run(options.settings))
    return 0
