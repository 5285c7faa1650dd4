"""The conditions of a common prefix cache. Ready does not depend on them: engines that share no pages serve as well."""

from collections.abc import Collection

from dps_engines.pools import POOLS, PoolName
from dps_operator.builders.mooncake import managed_master
from dps_operator.builders.prefix_cache import common, unshareable
from dps_operator.prefix_cache.engines import EngineReports
from dps_operator.prefix_cache.health import CacheHealth
from dps_operator.resources import Router
from dps_operator.status.condition import Condition
from dps_operator.status.observed import Observed


def prefix_cache_conditions(router: Router, observed: Observed) -> list[Condition]:
    """Whether the pools can read each other's pages, and do; empty if each engine has its own prefix cache."""
    if common(router.spec) is None:
        return []
    if found := unshareable(router.spec):
        message = f"each engine has its own prefix cache: {found.message}"
        return [Condition("PrefixCacheShared", "False", found.reason, message)]
    shared = _shared((observed.cache_health or CacheHealth()).reports)
    return [shared, _master_not_ready(router, observed) or _serving(observed.cache_health)]


def _shared(reports: EngineReports) -> Condition:
    """Whether the pools share pages, given that they can according to the spec."""
    for pool, problem in reports.unshared.items():
        message = f"an engine of the {pool} pool shares no pages: {problem}"
        return Condition("PrefixCacheShared", "False", "EngineNotSharing", message)
    if reports.different:
        message = (
            "the pools use different directories, or store pages that the other pool cannot read; compare the volumes "
            "of both pools, and the log lines with 'dps prefix cache: shared'"
        )
        return Condition("PrefixCacheShared", "False", "GeometryDiffers", message)
    for pool, problem in reports.write_only.items():
        message = f"an engine of the {pool} pool reads no pages, but others can read those that it writes: {problem}"
        return Condition("PrefixCacheShared", "False", "OneWay", message)
    if silent := [pool for pool in POOLS if pool not in reports.reporting]:
        message = f"{_pools(silent)} have not reported whether they share pages"
        return Condition("PrefixCacheShared", "Unknown", "NotReported", message)
    message = "the engines of both pools can read each other's pages"
    return Condition("PrefixCacheShared", "True", "BothWays", message)


def _master_not_ready(router: Router, observed: Observed) -> Condition | None:
    """The condition while the Mooncake master that the operator deploys is not ready; None otherwise."""
    if managed_master(router) is None:
        return None
    replicas = observed.replicas(router, "mooncake")
    if replicas is not None and replicas.ready > 0:
        return None
    cause = observed.with_cause("the Mooncake master is not ready", router, "mooncake")
    message = f"{cause}; running engines serve but share no pages, and new engines cannot start"
    return Condition("PrefixCacheServing", "False", "MasterNotReady", message)


def _serving(health: CacheHealth | None) -> Condition:
    """Whether the storage of the common prefix cache serves the pages that it should contain."""
    health = health or CacheHealth()
    reports = health.reports
    if reports.full:
        message = f"{_pools(reports.full)} cannot store most of their pages, because the storage has too little space"
        return Condition("PrefixCacheServing", "False", "StorageFull", message)
    if reports.failing:
        message = (
            f"{_pools(reports.failing)} cannot write, read or verify most of their pages; see the outcomes of "
            "dps_prefix_cache_pages_total in their metrics"
        )
        return Condition("PrefixCacheServing", "False", "StorageFailing", message)
    if reports.slow:
        found = " and ".join(f"the {pool} pool ({text})" for pool, text in reports.slow.items())
        message = f"fetching tokens takes longer than computing them in {found}"
        return Condition("PrefixCacheServing", "False", "StorageSlow", message)
    if health.unreachable:
        return Condition("PrefixCacheServing", "Unknown", "GatewaysUnreachable", health.unreachable)
    if not health.judged:
        message = "too few sessions have changed pools since the operator was started"
        return Condition("PrefixCacheServing", "Unknown", "NotMeasured", message)
    if health.unserved:
        message = (
            f"{_pools(health.unserved)} fetch less than half of the tokens that the storage should contain; look for "
            "lines with 'dps prefix cache' in their logs"
        )
        return Condition("PrefixCacheServing", "False", "StorageNotServing", message)
    return Condition("PrefixCacheServing", "True", "StorageServing", "the engines fetch from the storage")


def _pools(names: Collection[PoolName]) -> str:
    return f"the engines of the {' and '.join(f'{pool} pool' for pool in POOLS if pool in names)}"
