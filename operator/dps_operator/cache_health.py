"""Observes whether the common prefix caches of DPSRouters serve their engines, for a condition."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from dps_engines.pools import POOLS, PoolName
from dps_operator.diagnose import CacheHealth
from dps_operator.effective import Router, effective_routers
from dps_operator.errors import GatewaysUnreachableError
from dps_operator.metrics import MetricsReader, gateway_addresses
from dps_operator.objects import Key
from dps_operator.observe import Observations
from dps_operator.work_queue import WorkQueue

POLL_SECONDS: Final = 15.0
"""Interval at which the metrics of gateways and engines are read."""

HALF_LIFE_SECONDS: Final = 300.0
"""Time after which the weight of an observation has halved."""
ENOUGH_PAGES: Final = 100.0
"""Pages that have to be written, or read, in a pool before its storage is judged, and before the result changes."""
ENOUGH_FETCHES: Final = 20.0
"""The fetches that are needed in a pool before their bandwidth is compared with the break-even."""
FAILED_SHARE: Final = 0.5
"""The storage counts as full or failing if at least this share of the pages could not be written or read."""
ENOUGH_TOKENS: Final = 10_000.0
"""Fetchable tokens that have to be observed in a pool before it counts as judged, and before its result changes."""
SERVED_SHARE: Final = 0.5
"""Least share of the fetchable tokens that a pool with a working storage fetches, as in DPSPrefixCacheNotServing."""

GIBIBYTE: Final = 1.073741824
"""In GB."""

_COUNTERS: Final = {
    "sglang:prefetch_bandwidth_sum": "bandwidth",
    "sglang:prefetch_bandwidth_count": "fetches",
    "sglang:realtime_tokens_total": "prefilled",
    "sglang:per_stage_req_latency_seconds_sum": "prefill_seconds",
}
_SELECTED: Final = {"prefilled": ("mode", "prefill_compute"), "prefill_seconds": ("stage", "prefill_forward")}
"""The label that a sample of these counters must have."""


@dataclass(frozen=True)
class EngineSample:
    """The metrics of one engine that concern the common prefix cache."""

    sharing: frozenset[tuple[str, str]] = frozenset()
    """For each of its processes, the pages that it shares, or why it shares none."""
    counters: Mapping[str, float] = field(default_factory=dict)
    """Since the engine has started: pages by outcome, and the values of `_COUNTERS`."""
    kv_gigabytes_per_token: float = 0.0


def engine_sample(text: str) -> EngineSample:
    """What an engine's /metrics state. An engine without the plugin, or with an older one, states nothing.

    Raises ValueError or LookupError.
    """
    sharing: set[tuple[str, str]] = set()
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if name == "dps_prefix_cache_sharing" and sample.value:
                sharing.add((sample.labels["pages"], sample.labels["problem"]))
            elif name == "dps_prefix_cache_pages_total" or name in _COUNTERS:
                key = _COUNTERS.get(name) or sample.labels["outcome"]
                label, value = _SELECTED.get(key, ("", None))
                if sample.labels.get(label) == value:
                    counters[key] = counters.get(key, 0.0) + sample.value
            elif name in ("sglang:kv_cache_memory_usage_gb", "sglang:max_total_num_tokens"):
                gauges[name] = max(gauges.get(name, 0.0), sample.value)
    tokens = gauges.get("sglang:max_total_num_tokens", 0.0)
    memory = gauges.get("sglang:kv_cache_memory_usage_gb", 0.0) * GIBIBYTE
    return EngineSample(frozenset(sharing), counters, memory / tokens if tokens else 0.0)


Counters = Mapping[PoolName, Mapping[str, float]]
"""The tokens of each pool that were fetchable and fetched since a gateway has started."""


def counters(text: str) -> Counters:
    """The tokens in one gateway's /metrics. Raises ValueError or LookupError."""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "dps_fetchable_tokens_total":
                found[sample.labels["pool"]]["fetchable"] = sample.value
            elif sample.name == "dps_prompt_tokens_by_source_total" and sample.labels["source"] == "fetched":
                found[sample.labels["pool"]]["fetched"] = sample.value
    return {pool: found[pool] for pool in POOLS}


class _Sums:
    """How much the counters of the processes of each pool have grown, with weights that decrease over time."""

    def __init__(self) -> None:
        self.pools: dict[PoolName, dict[str, float]] = {pool: {} for pool in POOLS}
        self._last: dict[tuple[PoolName, str], Mapping[str, float]] = {}
        """By pool, and by the address of the process."""
        self._updated = 0.0

    def add(self, pool_counters: Mapping[PoolName, Mapping[str, Mapping[str, float]]], now: float) -> None:
        """Include the counters of all processes, by their addresses. The first ones of a process are a baseline."""
        weight = 2 ** (-(now - self._updated) / HALF_LIFE_SECONDS)
        last = {}
        for pool, processes in pool_counters.items():
            sums = {name: weight * total for name, total in self.pools[pool].items()}
            for address, present in processes.items():
                for name, new in _increase(self._last.get((pool, address)), present).items():
                    sums[name] = sums.get(name, 0.0) + new
                last[pool, address] = present
            self.pools[pool] = sums
        self._last, self._updated = last, now


class Tally:
    """What the gateways and engines of one DPSRouter have reported."""

    def __init__(self) -> None:
        self.health = CacheHealth()
        self._tokens, self._pages = _Sums(), _Sums()
        self._states: dict[PoolName, set[tuple[str, str]]] = {}
        """What the engines of a pool shared when one of them last answered."""

    def add_gateways(self, found: Mapping[str, Counters], now: float) -> None:
        """Include the counters of all gateways, by their addresses, at a time in seconds."""
        by_pool = {pool: {address: one[pool] for address, one in found.items()} for pool in POOLS}
        self._tokens.add(by_pool, now)
        self.health.unreachable = ""
        for pool, sums in self._tokens.pools.items():
            fetchable = sums.get("fetchable", 0.0)
            if fetchable >= ENOUGH_TOKENS:
                self.health.judged.add(pool)
                _judge(self.health.unserved, pool, sums.get("fetched", 0.0) < SERVED_SHARE * fetchable)

    def add_engines(self, samples: Mapping[PoolName, Mapping[str, EngineSample]], now: float) -> None:
        """Include the engines of each pool that have answered, by their addresses, at a time in seconds."""
        self._pages.add(
            {
                pool: {address: sample.counters for address, sample in engines.items()}
                for pool, engines in samples.items()
            },
            now,
        )
        health = self.health
        for pool, engines in samples.items():
            sums = self._pages.pools[pool]
            _judge(health.full, pool, _mostly(sums, ("full",), ("stored", "write_error")))
            written = _mostly(sums, ("write_error",), ("stored", "full"))
            read = _mostly(sums, ("read_error",), ("read",))
            known = [outcome for outcome in (written, read) if outcome is not None]
            _judge(health.failing, pool, any(known) if known else None)
            per_token = max((sample.kv_gigabytes_per_token for sample in engines.values()), default=0.0)
            _judge_bandwidth(health.slow, pool, sums, per_token)
            if engines:
                self._states[pool] = {state for sample in engines.values() for state in sample.sharing}
        health.reporting = {pool for pool, states in self._states.items() if states}
        problems = {pool: [why for _, why in sorted(self._states.get(pool, ())) if why] for pool in POOLS}
        health.unshared = {pool: found[0] for pool, found in problems.items() if found}
        # Both pools share pages, but no engine of one pool has the pages of an engine of the other.
        pages = [{pages for pages, _ in states if pages} for states in self._states.values()]
        health.different = len(pages) == len(POOLS) and all(pages) and not set.intersection(*pages)


def _increase(before: Mapping[str, float] | None, present: Mapping[str, float]) -> dict[str, float]:
    """How much each counter has grown. Those of an engine that has restarted begin at 0."""
    if before is None:
        return {}
    restarted = any(present.get(name, 0.0) < value for name, value in before.items())
    return {name: value if restarted else value - before.get(name, 0.0) for name, value in present.items()}


def _mostly(sums: Mapping[str, float], bad: Collection[str], good: Collection[str]) -> bool | None:
    """Whether most of the pages had bad outcomes; None if there are too few pages."""
    failed = sum(sums.get(outcome, 0.0) for outcome in bad)
    total = failed + sum(sums.get(outcome, 0.0) for outcome in good)
    return failed >= FAILED_SHARE * total if total >= ENOUGH_PAGES else None


def _judge(pools: set[PoolName], pool: PoolName, failed: bool | None) -> None:
    """Add a pool to those with a problem, or remove it, unless there is too little evidence."""
    if failed:
        pools.add(pool)
    elif failed is not None:
        pools.discard(pool)


def _judge_bandwidth(
    slow: dict[PoolName, str], pool: PoolName, sums: Mapping[str, float], kv_gigabytes_per_token: float
) -> None:
    """Add a pool to `slow`, or remove it, by the criterion of the alert DPSPrefixCacheSlow.

    A pool that remains slow keeps its text, because each change of a condition's message is written to the status.
    """
    fetches, seconds = sums.get("fetches", 0.0), sums.get("prefill_seconds", 0.0)
    if fetches < ENOUGH_FETCHES or not seconds or not kv_gigabytes_per_token:
        return
    bandwidth = sums["bandwidth"] / fetches
    break_even = sums.get("prefilled", 0.0) / seconds * kv_gigabytes_per_token
    if bandwidth >= break_even:
        slow.pop(pool, None)
    else:
        slow.setdefault(pool, f"{bandwidth:.2g} GB/s instead of {break_even:.2g}")


class CacheWatch:
    """Observes the common prefix cache of each DPSRouter that has one."""

    def __init__(self, observations: Observations, metrics: MetricsReader) -> None:
        self._observations = observations
        self._metrics = metrics
        self._tallies: dict[Key, Tally] = {}

    async def run(self, queue: WorkQueue) -> None:
        """Observe until cancelled. A DPSRouter is queued for reconciling when the result changes."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for key in await self.once(time.monotonic()):
                queue.add(key)

    async def once(self, now: float) -> list[Key]:
        """Observe every DPSRouter once, at a time in seconds. Returns those for which the result has changed."""
        routers = effective_routers(self._observations, lambda spec: "prefixCache" in spec)
        sharing = {key: router for key, router in routers.items() if router.shared_cache is not None}
        self._tallies = {key: self._tallies.get(key, Tally()) for key in sharing}
        await asyncio.gather(*(self._observe(router, now) for router in sharing.values()))
        found = {key: deepcopy(tally.health) for key, tally in self._tallies.items()}
        before, self._observations.cache_health = self._observations.cache_health, found
        return [key for key, health in found.items() if health != before.get(key, CacheHealth())]

    async def _observe(self, router: Router, now: float) -> None:
        key = router.key
        tally = self._tallies[key]
        try:
            addresses = gateway_addresses(self._observations.pods(key))
            tally.add_gateways(await self._metrics.gateways(addresses, counters), now)
        except GatewaysUnreachableError as error:
            tally.health.unreachable = str(error)
        tally.add_engines({pool: await self._samples(router, pool) for pool in POOLS}, now)

    async def _samples(self, router: Router, pool: PoolName) -> dict[str, EngineSample]:
        addresses = [
            pod.ip
            for pod in self._observations.pods(router.key)
            if pod.component == pool and pod.ip and not pod.terminating
        ]
        return await self._metrics.engines(addresses, router.pools[pool].runtime.port, engine_sample)
