"""Whether the storage of a common prefix cache serves the pages that it should contain. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from dps_engines.pools import POOLS, PoolName
from dps_operator.prefix_cache.engines import HALF_LIFE_SECONDS, EngineReports

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
