"""The conditions of a common prefix cache. Ready does not depend on them: engines that share no pages serve as well."""

from dps_engines.pools import POOLS
from dps_operator.builders.mooncake import managed_master
from dps_operator.builders.prefix_cache import common, unshareable
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
    message = "the engines of both pools can read each other's pages"
    shared = Condition("PrefixCacheShared", "True", "BothWays", message)
    return [shared, _master_not_ready(router, observed) or _serving(observed.cache_health)]


def _master_not_ready(router: Router, observed: Observed) -> Condition | None:
    """The condition while the Mooncake master that the operator deploys is not ready; None otherwise."""
    if managed_master(router) is None:
        return None
    replicas = observed.replicas(router, "mooncake")
    if replicas is not None and replicas.ready > 0:
        return None
    problem = observed.problem("mooncake")
    cause = f": {problem.message}" if problem else ""
    message = f"engines share no pages and cannot start, because the Mooncake master is not ready{cause}"
    return Condition("PrefixCacheServing", "False", "MasterNotReady", message)


def _serving(health: CacheHealth | None) -> Condition:
    """Whether the storage of the common prefix cache serves the pages that it should contain."""
    if health is not None and health.unreachable:
        return Condition("PrefixCacheServing", "Unknown", "GatewaysUnreachable", health.unreachable)
    if health is None or not health.judged:
        message = "too few sessions have changed pools since the operator was started"
        return Condition("PrefixCacheServing", "Unknown", "NotMeasured", message)
    if health.unserved:
        pools = " and ".join(f"{pool} pool" for pool in POOLS if pool in health.unserved)
        message = (
            f"the engines of the {pools} fetch less than half of the tokens that the storage should contain; look for "
            "lines with 'dps prefix cache' in their logs"
        )
        return Condition("PrefixCacheServing", "False", "StorageNotServing", message)
    return Condition("PrefixCacheServing", "True", "StorageServing", "the engines fetch from the storage")
