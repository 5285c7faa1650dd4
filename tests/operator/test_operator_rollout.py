"""The order of rollouts: one pool is rolled out while the other keeps serving."""

from typing import Any

import pytest

from dps_engines.pools import POOLS
from dps_operator.builders.engine import engine_deployment
from dps_operator.observe import Child
from dps_operator.resources import TEMPLATE_HASH
from dps_operator.rollout import pool_on_hold
from dps_testkit.operator.objects import replicas, workload
from dps_testkit.operator.routers import SETTINGS, smallest

NEW, OLD = "new", "old"
ROLLOUTS: dict[str, tuple[Child | None, Child | None, str | None]] = {
    "no Deployments": (None, None, None),
    "no change": (workload("s", replicas(), NEW), workload("g", replicas(), NEW), None),
    "both change: speculative pool first": (
        workload("s", replicas(), OLD),
        workload("g", replicas(), OLD),
        "greedy",
    ),
    "first pool rolling out": (
        workload("s", replicas(settled=False), NEW),
        workload("g", replicas(), OLD),
        "greedy",
    ),
    "first pool settled": (workload("s", replicas(), NEW), workload("g", replicas(), OLD), None),
    "second pool rolling out when the first changes again": (
        workload("s", replicas(), OLD),
        workload("g", replicas(settled=False), NEW),
        "speculative",
    ),
    "first pool not serving": (workload("s", replicas(0), NEW), workload("g", replicas(), OLD), None),
    "second pool not serving": (
        workload("s", replicas(settled=False), NEW),
        workload("g", replicas(0), OLD),
        None,
    ),
    "unready replica of the new template": (
        workload("s", replicas(2, 3), NEW),
        workload("g", replicas(), OLD),
        None,
    ),
    "only one Deployment": (None, workload("g", replicas(), OLD), None),
}


@pytest.mark.parametrize(("speculative", "greedy", "wanted"), ROLLOUTS.values(), ids=ROLLOUTS.keys())
def test_only_one_pool_rolls_out_at_once(
    speculative: Child | None, greedy: Child | None, wanted: str | None
) -> None:
    desired = [engine_deployment(smallest(), pool, SETTINGS) for pool in POOLS]
    for manifest in desired:
        manifest["metadata"]["annotations"][TEMPLATE_HASH] = NEW
    seen = {"speculative": speculative, "greedy": greedy}
    assert pool_on_hold(desired, {name: one for name, one in seen.items() if one}) == wanted


INTERRUPTIONS: dict[str, tuple[dict[str, Any], Child, str | None]] = {
    "the other pool is not serving": ({"type": "Recreate"}, workload("s", replicas(0), NEW), "greedy"),
    "unavailable replicas are allowed": (
        {"maxSurge": 0, "maxUnavailable": 1},
        workload("s", replicas(0), NEW),
        "greedy",
    ),
    "the other pool was scaled to zero": ({"type": "Recreate"}, workload("s", replicas(0, 0), NEW), None),
    "the other pool serves": ({"type": "Recreate"}, workload("s", replicas(), NEW), None),
    "no interruption": ({"maxSurge": "50%"}, workload("s", replicas(0), NEW), None),
}


@pytest.mark.parametrize(("strategy", "other", "wanted"), INTERRUPTIONS.values(), ids=INTERRUPTIONS.keys())
def test_rollout_that_interrupts_a_pool_waits_until_the_other_one_serves(
    strategy: dict[str, Any], other: Child, wanted: str | None
) -> None:
    spec = smallest(greedy={"strategy": strategy})
    desired = [engine_deployment(spec, pool, SETTINGS) for pool in POOLS]
    for manifest in desired:
        manifest["metadata"]["annotations"][TEMPLATE_HASH] = NEW
    assert pool_on_hold(desired, {"speculative": other, "greedy": workload("g", replicas(), OLD)}) == wanted
