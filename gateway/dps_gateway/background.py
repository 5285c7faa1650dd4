"""The gateway's background tasks and their supervision."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from dps_gateway.kubernetes_api import ApiServer, watch_config_map, watch_service
from dps_gateway.pool import Pool
from dps_gateway.reload import ConfigFile, receive_config, watch_config
from dps_gateway.routing.decision import LearningPolicy
from dps_gateway.runtime import Runtime
from dps_gateway.session.store import write_behind
from dps_gateway.shared_learning import keep_synchronized, learned_key
from dps_gateway.telemetry.json_log import flush_periodically
from dps_gateway.telemetry.metrics import Metrics
from dps_gateway.upstream.health import watch_configuration, watch_generation, watch_health, watch_load

log = logging.getLogger(__name__)

RESTART_SECONDS: Final = 1.0

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
    tasks: dict[str, Task] = {
        "health": lambda: watch_health(
            runtime.pools.values(),
            runtime.engine.health_path,
            lambda: runtime.config.timeouts.health_interval_seconds,
        ),
        "generation": lambda: watch_generation(
            runtime.pools.values(),
            runtime.engine.generation_path,
            lambda: runtime.config.timeouts.health_interval_seconds,
            lambda: runtime.config.timeouts.silent_seconds,
        ),
        "engine-load": lambda: watch_load(
            runtime.pools.values(),
            runtime.engine.load_path,
            runtime.engine.load_of,
            lambda: isinstance(runtime.policy, LearningPolicy),
        ),
        "engine-configuration": lambda: watch_configuration(
            runtime.pools.values(),
            runtime.engine.configuration_path,
            runtime.engine.configuration_of,
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
