"""The gateway's background tasks and their supervision."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from dps_gateway.config import ConfigFile
from dps_gateway.kubernetes_api import ApiServer, watch_config_map, watch_service
from dps_gateway.pool import Pool
from dps_gateway.routing.learning import learns
from dps_gateway.runtime import Runtime
from dps_gateway.session.store import write_behind
from dps_gateway.shared_learning import keep_synchronized, learned_key
from dps_gateway.telemetry.json_log import flush_periodically
from dps_gateway.telemetry.metrics import Metrics
from dps_gateway.upstream.health import watch_configuration, watch_generation, watch_health, watch_load

log = logging.getLogger(__name__)

RESTART_SECONDS: Final = 1.0
POLL_SECONDS: Final = 1.0
"""Interval at which the configuration's files are checked for changes."""

Task = Callable[[], Awaitable[None]]


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
            watch_load, pools, engine.load_path, engine.load_of, lambda: learns(runtime.policy)
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
