"""`dps operator`: the operator process."""

import argparse
import asyncio
import contextlib
import datetime
import logging
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp
import kopf
from aiohttp import web

from dps_operator.cluster import KubernetesCluster
from dps_operator.errors import ClusterError, LeadershipLostError
from dps_operator.gateway_metrics import GatewayMetrics
from dps_operator.gpu_budget.balancer import Allocations, Balancer
from dps_operator.gpu_budget.demand import GatewayDemand
from dps_operator.handlers import kopf_settings, registry
from dps_operator.health import application
from dps_operator.leader import Lease
from dps_operator.mounts import MountWatch
from dps_operator.observe import Observations
from dps_operator.prefix_cache.watch import CacheWatch
from dps_operator.reconcile import Reconciler
from dps_operator.resync import Resync
from dps_operator.scale_to_zero.scaler import GatewayActivity, IdlePools, Scaler
from dps_operator.settings import (
    DEFAULT_GATEWAY_IMAGE,
    DEFAULT_LAB_IMAGE,
    DEFAULT_LOADER_IMAGE,
    DEFAULT_PLUGIN_IMAGE,
    DEFAULT_REDIS_IMAGE,
    Settings,
)
from dps_operator.work_queue import WorkQueue

WATCH_RETRY_SECONDS = 5.0
"""Seconds between a failure of all watches and their restart."""

SHUTDOWN_SECONDS = 10.0
"""Time limit for tasks to finish at shutdown, in seconds."""

log = logging.getLogger(__name__)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    cluster = await KubernetesCluster.connect(settings.request_timeout)
    observations = Observations()
    allocations, idle_pools = Allocations(), IdlePools()
    gateways = aiohttp.ClientSession()
    metrics = GatewayMetrics(gateways)
    caches = CacheWatch(observations, metrics)
    mounts = MountWatch(cluster, observations)
    reconciler = Reconciler(cluster, observations, settings, _now, allocations, caches.service, idle_pools)
    queue = WorkQueue(reconciler.reconcile)
    balancer = Balancer(observations, queue, GatewayDemand(metrics), allocations, _now)
    scaler = Scaler(observations, queue, GatewayActivity(metrics), idle_pools)
    resync = Resync(cluster, observations, queue, settings)
    lease: Lease | None = None
    if settings.lease:
        namespace, _, name = settings.lease.partition("/")
        lease = Lease(cluster, namespace, name, f"{socket.gethostname()}-{secrets.token_hex(4)}")
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def install_signal_handlers() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)

    install_signal_handlers()
    leading, watching = asyncio.Event(), asyncio.Event()
    server = web.AppRunner(application(queue, resync, leading, watching, settings), shutdown_timeout=1)
    await server.setup()
    await web.TCPSite(server, port=settings.health_port).start()

    # Kopf identifies this process by POD_ID. By default it looks up the user name, which fails in a container whose
    # user has no passwd entry.
    os.environ.setdefault("POD_ID", socket.gethostname())

    async def watch() -> None:
        """Run Kopf until the set of installed kinds changes."""
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
        # Kopf replaces the signal handlers, and ignores signals for seconds while it shuts down after a failure.
        install_signal_handlers()
        try:
            await kopf.run_tasks(tasks, ignored=ours)
        finally:
            watching.clear()

    async def watch_forever() -> None:
        # Watching starts after the first complete listing, because a reconcile requires all children in the cache.
        await resync.complete.wait()
        while True:
            try:
                await watch()
                log.info("restarting watches: the set of installed kinds has changed")
            except Exception as error:
                # The API server failed while Kopf resolved the kinds to watch, or one of them was removed.
                log.warning("watching failed: %s; retrying in %.0f s", error, WATCH_RETRY_SECONDS)
                await asyncio.sleep(WATCH_RETRY_SECONDS)
                with contextlib.suppress(ClusterError):
                    await resync.once()

    async def lead() -> None:
        """Let the other tasks start once this replica holds the Lease; return when it has lost it."""
        if lease is None:
            leading.set()
            await asyncio.Event().wait()
        else:
            await lease.acquire()
            leading.set()
            try:
                await lease.hold()
            except LeadershipLostError as error:
                log.error("this replica stops: %s", error)

    async def while_leading(run: Callable[[], Awaitable[None]]) -> None:
        await leading.wait()
        await run()

    functions: list[Callable[[], Awaitable[None]]] = [resync.run, watch_forever, balancer.run, scaler.run]
    functions += [partial(caches.run, queue), partial(mounts.run, queue), *[queue.work] * settings.workers]
    parts = [asyncio.create_task(part) for part in (lead(), *map(while_leading, functions))]
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((stopped, *parts), return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            # On failure Kopf cancels tasks that it did not start. The process exits, so that the kubelet restarts it.
            raise RuntimeError("a task of the operator ended unexpectedly")
    finally:
        for task in (stopped, *parts):
            task.cancel()
        _, hanging = await asyncio.wait((stopped, *parts), timeout=SHUTDOWN_SECONDS)
        for task in hanging:
            log.error("task did not stop: %r", task)
        if lease is not None and leading.is_set():
            await lease.release()
        await server.cleanup()
        await gateways.close()
        await cluster.close()


def settings_from(arguments: list[str]) -> Settings:
    """Settings from the command line. DPS_OPERATOR_<OPTION> in the environment sets the default of an option."""

    def environment(option: str, default: str) -> str:
        return os.environ.get(f"DPS_OPERATOR_{option}", default)

    parser = argparse.ArgumentParser(prog="dps operator", description="Reconcile DPSRouter resources.")
    parser.add_argument(
        "--namespace",
        action="append",
        default=[name for name in environment("NAMESPACES", "").split(",") if name],
        help="namespace to watch; repeatable (default: all namespaces)",
    )
    parser.add_argument(
        "--gateway-image",
        default=environment("GATEWAY_IMAGE", DEFAULT_GATEWAY_IMAGE),
        help="gateway image of DPSRouters without spec.gateway.image (default: %(default)s)",
    )
    parser.add_argument(
        "--redis-image",
        default=environment("REDIS_IMAGE", DEFAULT_REDIS_IMAGE),
        help="image of managed Redis servers (default: %(default)s)",
    )
    parser.add_argument(
        "--plugin-image",
        default=environment("PLUGIN_IMAGE", DEFAULT_PLUGIN_IMAGE),
        help="image with the SGLang plugin of the common prefix cache, the operator's own (default: %(default)s)",
    )
    parser.add_argument(
        "--lab-image",
        default=environment("LAB_IMAGE", DEFAULT_LAB_IMAGE),
        help="image of calibrations (default: %(default)s)",
    )
    parser.add_argument(
        "--loader-image",
        default=environment("LOADER_IMAGE", DEFAULT_LOADER_IMAGE),
        help="image of rclone, which downloads models from buckets (default: %(default)s)",
    )
    parser.add_argument(
        "--lease",
        metavar="NAMESPACE/NAME",
        default=environment("LEASE", ""),
        help="Lease of the replica that reconciles, if there are several (default: none)",
    )
    parser.add_argument(
        "--pull-secret",
        action="append",
        default=[name for name in environment("PULL_SECRETS", "").split(",") if name],
        help="pull secret of all pods of DPSRouters, in their namespaces; repeatable (default: none)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=int(environment("WORKERS", "8")),
        help="DPSRouters reconciled concurrently (default: %(default)s)",
    )
    parser.add_argument(
        "--resync-seconds",
        type=float,
        default=float(environment("RESYNC_SECONDS", "600")),
        help="seconds between full listings of all watched objects (default: %(default)s)",
    )
    parser.add_argument(
        "--health-port",
        type=int,
        default=int(environment("HEALTH_PORT", "8080")),
        help="port of /healthz, /readyz and /metrics (default: %(default)s)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="log debug messages, including every event that is handled"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
    )
    # The access log has a line for every probe.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    # At DEBUG the client logs response bodies, which include Secrets.
    logging.getLogger("kubernetes").setLevel(logging.INFO)
    if not options.verbose:
        logging.getLogger("kopf").setLevel(logging.WARNING)
    return Settings(
        gateway_image=options.gateway_image,
        redis_image=options.redis_image,
        plugin_image=options.plugin_image,
        lab_image=options.lab_image,
        loader_image=options.loader_image,
        pull_secrets=tuple(options.pull_secret),
        namespaces=tuple(options.namespace),
        lease=options.lease,
        workers=options.workers,
        resync_seconds=options.resync_seconds,
        health_port=options.health_port,
    )


def main(arguments: list[str]) -> int:
    """Run `dps operator`; returns 0 after SIGTERM or SIGINT."""
    asyncio.run(run(settings_from(arguments)))
    return 0
