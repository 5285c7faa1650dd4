"""The condition PrefixCacheServing. No I/O."""

from dps_engines.pools import POOLS
from dps_operator.diagnose import Problem
from dps_operator.prefix_cache.service import CacheService
from dps_operator.verdict import Verdict


def master_not_ready(problem: Problem | None) -> Verdict:
    """The condition while the Mooncake master that the operator deploys is not ready. problem: of its pod."""
    cause = f": {problem.message}" if problem else ""
    message = f"engines share no pages and cannot start, because the Mooncake master is not ready{cause}"
    return Verdict("PrefixCacheServing", "False", "MasterNotReady", message)


def cache_serving(found: CacheService | None) -> Verdict:
    """Whether the storage of the common prefix cache serves the pages that it should contain."""
    if found is not None and found.unreachable:
        return Verdict("PrefixCacheServing", "Unknown", "GatewaysUnreachable", found.unreachable)
    if found is None or not found.judged:
        message = "too few sessions have changed pools since the operator was started"
        return Verdict("PrefixCacheServing", "Unknown", "NotMeasured", message)
    if found.unserved:
        pools = " and ".join(f"{pool} pool" for pool in POOLS if pool in found.unserved)
        message = (
            f"the engines of the {pools} fetch less than half of the tokens that the storage should contain; look for "
            "lines with 'dps prefix cache' in their logs"
        )
        return Verdict("PrefixCacheServing", "False", "StorageNotServing", message)
    return Verdict("PrefixCacheServing", "True", "StorageServing", "the engines fetch from the storage")
