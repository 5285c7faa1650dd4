"""The present state of this gateway replica, as documents for the admin port, without prompts and secrets."""

import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from dps_gateway.pool import Pool
from dps_gateway.runtime import Runtime
from dps_gateway.upstream.replica import Replica

MAX_SHOWN_IN_PROGRESS: Final = 200
"""The number of requests in progress that are shown, those that began first."""


@cache
def installed_version() -> str:
    """The version of this distribution, or "unknown" if it runs from a source tree that is not installed."""
    try:
        return version("dps-router")
    except PackageNotFoundError:
        return "unknown"


def pool_document(runtime: Runtime, name: Pool) -> dict[str, Any]:
    """A pool and its replicas."""
    pool = runtime.pools[name]
    return {
        "readyReplicas": len(pool.ready),
        "inFlight": pool.in_flight,
        "queued": pool.queued,
        "timeToFirstTokenSeconds": pool.time_to_first_token_seconds,
        "timePerOutputTokenSeconds": pool.time_per_output_token_seconds,
        "replicas": [
            {
                "id": replica.id,
                "url": replica.url,
                "ready": replica.ready,
                "state": _state(replica),
                "inFlight": replica.in_flight,
                "maxInFlight": pool.slots(replica),
            }
            for replica in pool.replicas.values()
        ],
    }


def _state(replica: Replica) -> str:
    if not replica.available:
        return "unavailable"
    if replica.hung:
        return "hung"
    if replica.ejected:
        return "ejected"
    return "probing" if replica.probing else "ready"


def state_document(runtime: Runtime) -> dict[str, Any]:
    """What the page shows besides the records of decisions."""
    config, redis = runtime.config, runtime.redis
    progress = [request.progress() for request in runtime.recent.in_progress]
    progress.sort(key=lambda request: -request["seconds"])
    return {
        "time": time.time(),
        "version": installed_version(),
        "model": config.model.name,
        "ready": runtime.ready,
        "draining": runtime.draining,
        "policy": config.routing.policy,
        "thresholdTokens": config.routing.threshold_tokens,
        "configuredAt": runtime.configured_at,
        "configError": runtime.config_error,
        "redis": "none" if redis is None else "degraded" if redis.degraded else "ok",
        "mirrorRecords": len(runtime.mirror),
        "port": config.listen.port,
        "tls": config.listen.tls is not None,
        "authenticated": runtime.keys is not None,
        "traceUrl": config.telemetry.trace_url,
        "decisions": runtime.recent.added,
        "pools": {name.value: pool_document(runtime, name) for name in Pool},
        "inProgress": progress[:MAX_SHOWN_IN_PROGRESS],
        "inProgressTotal": len(progress),
    }
