"""When a pool is scaled to zero and back: pure rules. `scaler.py` reads the gateways' metrics and applies them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from dps_engines.pools import POOLS, PoolName, other_pool
from dps_operator.api.spec import Spec
from dps_operator.builders.pool_engines import pool_of

SAMPLES: Final = {
    "dps_in_flight": "present",
    "dps_queued": "queued",
    "dps_queue_seconds_count": "served",
    "dps_pool_unavailable_total": "missed",
}
"""The gateway's samples from which each field of Activity is summed; queued requests count as present, too."""


UNSERVED_SECONDS: Final = 300
"""The time without a ready engine after which requests start the other pool as well. Most models load faster."""


@dataclass(frozen=True)
class Activity:
    """The requests for one pool that one gateway reports."""

    present: float = 0.0
    """Requests in flight and waiting."""
    queued: float = 0.0
    """Requests waiting."""
    served: float = 0.0
    """Requests that the pool has served since the gateway started."""
    missed: float = 0.0
    """Requests since then that should have been served by this pool while none of its engines was ready."""


Activities = Mapping[PoolName, Activity]


def activities(text: str) -> Activities:
    """The activity of both pools, from one gateway's /metrics. Raises ValueError or LookupError."""
    sums: dict[PoolName, dict[str, float]] = {pool: {} for pool in POOLS}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for pool in POOLS:
                if sample.name in SAMPLES and sample.labels.get("pool") == pool:
                    name = SAMPLES[sample.name]
                    sums[pool][name] = sums[pool].get(name, 0.0) + sample.value
    return {
        pool: Activity(**{**found, "present": found.get("present", 0.0) + found.get("queued", 0.0)})
        for pool, found in sums.items()
    }


def pools_with_zero(spec: Spec) -> list[PoolName]:
    """The pools that are scaled to zero while they are idle."""
    return [pool for pool in POOLS if idle_seconds(spec, pool) is not None]


def idle_seconds(spec: Spec, pool: PoolName) -> int | None:
    """The time without a request after which the pool is scaled to zero; None if it never is."""
    scaling = pool_of(spec, pool).autoscaling
    return scaling.idle_seconds if scaling is not None and scaling.min_replicas == 0 else None


def serving(scaled_to_zero: Sequence[PoolName]) -> str:
    """How a DPSRouter serves requests. scaled_to_zero: its idle pools."""
    if not scaled_to_zero:
        return "requests are served by both pools"
    if len(scaled_to_zero) == len(POOLS):
        return "both pools are idle and scaled to zero; requests wait until an engine has started"
    (idle,) = scaled_to_zero
    return f"requests are served by the {other_pool(idle)} pool; the {idle} pool is idle and scaled to zero"


def needed(
    pool: PoolName,
    now: Mapping[str, Activities],
    before: Mapping[str, Activities],
    overflowing: Collection[str],
) -> bool:
    """Whether there have been requests for the pool since the activity `before`.

    now, before: by the address of the gateway. Of a gateway that is not in `before`, only the present requests count,
    because its counters may be old. overflowing: the pools for which requests should not have to wait, because they
    serve or should. Requests that wait for one of them need the other one as well.
    """
    other = other_pool(pool)
    return any(
        found[pool].present > 0
        or (other in overflowing and found[other].queued > 0)
        or _has_new_requests(found[pool], before.get(address, found)[pool])
        for address, found in now.items()
    )


def _has_new_requests(now: Activity, before: Activity) -> bool:
    return now.served > before.served or now.missed > before.missed
