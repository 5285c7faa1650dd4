"""Observes whether the common prefix cache of a DPSRouter serves its engines, for a condition."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from dps_engines.pools import POOLS, PoolName

HALF_LIFE_SECONDS: Final = 300.0
"""Time after which the weight of an observation has halved."""
ENOUGH_PAGES: Final = 100.0
"""Pages that have to be written, or read, in a pool before its storage is judged, and before the result changes."""
ENOUGH_FETCHES: Final = 20.0
"""The fetches that are needed in a pool before their bandwidth is compared with the break-even."""
FAILED_SHARE: Final = 0.5
"""The storage counts as full or failing if at least this share of the pages could not be written or read."""

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


@dataclass(frozen=True)
class EngineReports:
    """What is wrong according to the engines of a DPSRouter; nothing, unless they report it."""

    reporting: frozenset[PoolName] = frozenset()
    """Pools of which an engine has reported the pages that it shares, or why it shares none."""
    unshared: Mapping[PoolName, str] = field(default_factory=dict)
    """Why an engine of these pools shares no pages."""
    different: bool = False
    """Whether the pools share no pages with each other, although each shares some."""
    full: frozenset[PoolName] = frozenset()
    """Pools for most of whose pages the storage had no space."""
    failing: frozenset[PoolName] = frozenset()
    """Pools most of whose pages could not be written or read."""
    slow: Mapping[PoolName, str] = field(default_factory=dict)
    """Pools that fetch more slowly than they compute, with the bandwidth when this was found."""


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
            elif name == "dps_prefix_cache_pages_total":
                counters[sample.labels["outcome"]] = sample.value
            elif key := _COUNTERS.get(name):
                label, value = _SELECTED.get(key, ("", None))
                if sample.labels.get(label) == value:
                    counters[key] = counters.get(key, 0.0) + sample.value
            elif name in ("sglang:kv_cache_memory_usage_gb", "sglang:max_total_num_tokens"):
                gauges[name] = max(gauges.get(name, 0.0), sample.value)
    tokens = gauges.get("sglang:max_total_num_tokens", 0.0)
    memory = gauges.get("sglang:kv_cache_memory_usage_gb", 0.0) * GIBIBYTE
    return EngineSample(frozenset(sharing), counters, memory / tokens if tokens else 0.0)


Samples = Mapping[PoolName, Mapping[str, EngineSample]]
"""The engines of each pool that have answered, by their addresses."""
States = frozenset[tuple[str, str]]
"""The pages that processes share, or why they share none."""


class EngineTally:
    """What the engines of one DPSRouter have reported, with weights that decrease over time."""

    def __init__(self) -> None:
        self.reports = EngineReports()
        self._sums: dict[PoolName, dict[str, float]] = {pool: {} for pool in POOLS}
        self._last: dict[str, Mapping[str, float]] = {}
        self._states: dict[PoolName, States] = {}
        """What the engines of a pool shared when one of them last answered."""
        self._updated = 0.0

    def add(self, samples: Samples, now: float) -> None:
        """Include the engines' counters at a time in seconds. The first counters of an engine are a baseline."""
        weight = 2 ** (-(now - self._updated) / HALF_LIFE_SECONDS)
        before = self.reports
        full, failing, slow = set(before.full), set(before.failing), dict(before.slow)
        for pool, engines in samples.items():
            sums = {name: weight * total for name, total in self._sums[pool].items()}
            for address, sample in engines.items():
                for name, new in _increase(self._last.get(address), sample.counters).items():
                    sums[name] = sums.get(name, 0.0) + new
            self._sums[pool] = sums
            _judge(full, pool, _share(sums, ("full",), ("stored", "write_error")))
            _judge(failing, pool, _failing(sums))
            per_token = max((sample.kv_gigabytes_per_token for sample in engines.values()), default=0.0)
            _judge_bandwidth(slow, pool, sums, per_token)
        self._last = {
            address: sample.counters for engines in samples.values() for address, sample in engines.items()
        }
        self._updated = now
        self._states.update({pool: _states(engines) for pool, engines in samples.items() if engines})
        self.reports = EngineReports(
            frozenset(pool for pool, states in self._states.items() if states),
            _problems(self._states),
            _different(self._states),
            frozenset(full),
            frozenset(failing),
            slow,
        )


def _increase(before: Mapping[str, float] | None, present: Mapping[str, float]) -> dict[str, float]:
    """How much each counter has grown. Those of an engine that has restarted begin at 0."""
    if before is None:
        return {}
    restarted = any(present.get(name, 0.0) < value for name, value in before.items())
    return {name: value if restarted else value - before.get(name, 0.0) for name, value in present.items()}


def _share(sums: Mapping[str, float], bad: Collection[str], good: Collection[str]) -> float | None:
    """The share of the pages with bad outcomes; None if there are too few pages."""
    failed = sum(sums.get(outcome, 0.0) for outcome in bad)
    total = failed + sum(sums.get(outcome, 0.0) for outcome in good)
    return failed / total if total >= ENOUGH_PAGES else None


def _failing(sums: Mapping[str, float]) -> float | None:
    """The larger share of the pages that could not be written, and of those that could not be read."""
    written = _share(sums, ("write_error",), ("stored", "full"))
    read = _share(sums, ("read_error",), ("read",))
    return max((share for share in (written, read) if share is not None), default=None)


def _judge(pools: set[PoolName], pool: PoolName, share: float | None) -> None:
    """Add a pool to those with a problem, or remove it, unless there is too little evidence."""
    if share is not None:
        pools.discard(pool)
        if share >= FAILED_SHARE:
            pools.add(pool)


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


def _problems(pools: Mapping[PoolName, States]) -> dict[PoolName, str]:
    """The problem of an engine of each pool that shares no pages."""
    unshared: dict[PoolName, str] = {}
    for pool in POOLS:
        for _, problem in sorted(pools.get(pool, ())):
            if problem:
                unshared.setdefault(pool, problem)
    return unshared


def _different(pools: Mapping[PoolName, States]) -> bool:
    """Whether both pools share pages, but no engine of one pool has the pages of an engine of the other."""
    pages = [{pages for pages, _ in states if pages} for states in pools.values()]
    return len(pages) == len(POOLS) and all(pages) and not set.intersection(*pages)


def _states(engines: Mapping[str, EngineSample]) -> States:
    return frozenset(state for sample in engines.values() for state in sample.sharing)


ENOUGH_TOKENS: Final = 10_000.0
"""Fetchable tokens that have to be observed in a pool before it counts as judged, and before its result changes."""
SERVED_SHARE: Final = 0.5
"""Least share of the fetchable tokens that a pool with a working storage fetches, as in DPSPrefixCacheNotServing."""

Counters = Mapping[PoolName, tuple[float, float]]
"""Fetchable and fetched tokens of each pool since a gateway has started."""


@dataclass(frozen=True)
class CacheHealth:
    """Whether the pools fetch from the common prefix cache."""

    unreachable: str = ""
    """Why it is unknown; empty if the gateways answer."""
    judged: frozenset[PoolName] = frozenset()
    """Pools that had enough tokens to fetch."""
    unserved: frozenset[PoolName] = frozenset()
    """Those of them that fetched too few."""
    reports: EngineReports = field(default_factory=EngineReports)
    """What the engines report."""


def counters(text: str) -> Counters:
    """The tokens in one gateway's /metrics. Raises ValueError or LookupError."""
    fetchable: dict[str, float] = {}
    fetched: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "dps_fetchable_tokens_total":
                fetchable[sample.labels["pool"]] = sample.value
            elif sample.name == "dps_prompt_tokens_by_source_total" and sample.labels["source"] == "fetched":
                fetched[sample.labels["pool"]] = sample.value
    return {pool: (fetchable.get(pool, 0.0), fetched.get(pool, 0.0)) for pool in POOLS}


@dataclass
class Tally:
    """The tokens that the gateways of one DPSRouter have observed, with weights that decrease over time."""

    health: CacheHealth = field(default_factory=CacheHealth)
    _sums: dict[PoolName, tuple[float, float]] = field(
        default_factory=lambda: dict.fromkeys(POOLS, (0.0, 0.0))
    )
    _last: dict[str, Counters] = field(default_factory=dict)
    """The last counters of each gateway, by its address."""
    _updated: float = 0.0

    def add(self, found: Mapping[str, Counters], now: float) -> None:
        """Include the counters of all gateways at a time in seconds. The first counters of a gateway are a baseline."""
        weight = 2 ** (-(now - self._updated) / HALF_LIFE_SECONDS)
        judged, unserved = set(self.health.judged), set(self.health.unserved)
        for pool in POOLS:
            fetchable, fetched = (weight * total for total in self._sums[pool])
            for address, present in found.items():
                before = self._last.get(address, present)[pool]
                # Both counters of a gateway that has restarted begin at 0.
                base = before if present[pool][0] >= before[0] else (0.0, 0.0)
                fetchable += present[pool][0] - base[0]
                fetched += max(0.0, present[pool][1] - base[1])
            self._sums[pool] = fetchable, fetched
            if fetchable >= ENOUGH_TOKENS:
                judged.add(pool)
                unserved.discard(pool)
                if fetched < SERVED_SHARE * fetchable:
                    unserved.add(pool)
        self._last, self._updated = dict(found), now
        self.health = CacheHealth("", frozenset(judged), frozenset(unserved))
