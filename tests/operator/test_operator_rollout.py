"""The order of rollouts: one pool is rolled out while the other keeps serving."""

from typing import Any

import pytest

from dps_engines.pools import POOLS
from dps_operator.build.engine import engine_deployment
from dps_operator.objects import TEMPLATE_HASH
from dps_operator.observe import Child
from dps_operator.rollout import pool_on_hold
from dps_testkit.operator.routers import SETTINGS, smallest
from tests.operator.objects import replicas, workload

NEW, OLD = "new", "old"


def speculative(template: str, *counts: int, **state: Any) -> Child:
    return workload("speculative", replicas(*counts, **state), template)


def greedy(template: str, *counts: int, **state: Any) -> Child:
    return workload("greedy", replicas(*counts, **state), template)


def on_hold(strategy: dict[str, Any], **seen: Child | None) -> str | None:
    """The pool whose rollout waits. strategy: that of the greedy pool."""
    spec = smallest(greedy={"strategy": strategy})
    desired = [engine_deployment(spec, pool, SETTINGS) for pool in POOLS]
    for manifest in desired:
        manifest["metadata"]["annotations"][TEMPLATE_HASH] = NEW
    return pool_on_hold(desired, {name: one for name, one in seen.items() if one})


ROLLOUTS: dict[str, tuple[Child | None, Child | None, str | None]] = {
    "no Deployments": (None, None, None),
    "no change": (speculative(NEW), greedy(NEW), None),
    "both change: speculative pool first": (speculative(OLD), greedy(OLD), "greedy"),
    "first pool rolling out": (speculative(NEW, settled=False), greedy(OLD), "greedy"),
    "first pool settled": (speculative(NEW), greedy(OLD), None),
    "second pool rolling out": (speculative(OLD), greedy(NEW, settled=False), "speculative"),
    "first pool not serving": (speculative(NEW, 0), greedy(OLD), None),
    "second pool not serving": (speculative(NEW, settled=False), greedy(OLD, 0), None),
    "unready replica of the new template": (speculative(NEW, 2, 3), greedy(OLD), None),
    "only one Deployment": (None, greedy(OLD), None),
}


@pytest.mark.parametrize(("first", "second", "wanted"), ROLLOUTS.values(), ids=ROLLOUTS.keys())
def test_only_one_pool_rolls_out_at_once(
    first: Child | None, second: Child | None, wanted: str | None
) -> None:
    assert on_hold({}, speculative=first, greedy=second) == wanted


INTERRUPTIONS: dict[str, tuple[dict[str, Any], Child, str | None]] = {
    "the other pool is not serving": ({"type": "Recreate"}, speculative(NEW, 0), "greedy"),
    "unavailable replicas": ({"maxSurge": 0, "maxUnavailable": 1}, speculative(NEW, 0), "greedy"),
    "the other pool was scaled to zero": ({"type": "Recreate"}, speculative(NEW, 0, 0), None),
    "the other pool serves": ({"type": "Recreate"}, speculative(NEW), None),
    "no interruption": ({"maxSurge": "50%"}, speculative(NEW, 0), None),
}


@pytest.mark.parametrize(("strategy", "other", "wanted"), INTERRUPTIONS.values(), ids=INTERRUPTIONS.keys())
def test_rollout_that_interrupts_a_pool_waits_until_the_other_one_serves(
    strategy: dict[str, Any], other: Child, wanted: str | None
) -> None:
    assert on_hold(strategy, speculative=other, greedy=greedy(OLD)) == wanted
