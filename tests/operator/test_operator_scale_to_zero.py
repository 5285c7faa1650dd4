"""Pools that are scaled to zero while they are idle, and back when gateways report requests for them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_engines.pools import POOLS, PoolName
from dps_operator.autoscale import (
    UNSERVED_SECONDS,
    Activities,
    Activity,
    activities,
    demand,
    needed,
)
from dps_operator.build import children
from dps_operator.build.gateway import gateway_config
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router
from tests.operator.harness import KEY, ScalingHarness

ZERO = {"minReplicas": 0, "maxReplicas": 1, "idleSeconds": 60}
SPECULATIVE = SMALLEST["pools"]["speculative"]
BOTH = {"speculative": {**SPECULATIVE, "autoscaling": ZERO}, "greedy": {"autoscaling": ZERO}}
GREEDY = {"speculative": SPECULATIVE, "greedy": {"autoscaling": ZERO}}
METRICS = """\
# TYPE dps_in_flight gauge
dps_in_flight{pool="speculative"} 3.0
dps_in_flight{pool="greedy"} 0.0
# TYPE dps_queued gauge
dps_queued{pool="speculative"} 2.0
# TYPE dps_queue_seconds histogram
dps_queue_seconds_bucket{le="+Inf",pool="speculative"} 7.0
dps_queue_seconds_count{pool="speculative"} 7.0
dps_queue_seconds_sum{pool="speculative"} 0.5
# TYPE dps_pool_unavailable_total counter
dps_pool_unavailable_total{pool="greedy"} 4.0
"""


class ZeroHarness(ScalingHarness):
    """A DPSRouter whose pools can lose all their ready engines."""

    async def poll_without_ready_engines(self, seconds: int) -> dict[PoolName, int]:
        """Read the activity once, `seconds` later, and reconcile, while no engine is ready."""
        self.time += seconds
        for pool in POOLS:
            self.object("Deployment", f"qwen-{pool}")["status"] = {}
        await self.reconcile()
        await self.scaler.once(self.time)
        await self.reconcile()
        return self.replicas()


async def harness(pools: dict[str, Any]) -> ZeroHarness:
    """A DPSRouter that serves, whose activity has been read once."""
    made = ZeroHarness({**SMALLEST, "pools": pools})
    assert await made.settle() == {"speculative": 1, "greedy": 1}
    await made.poll()
    return made


async def test_idle_pools_are_scaled_to_zero_and_back() -> None:
    made = await harness(BOTH)
    assert await made.poll(59) == {"speculative": 1, "greedy": 1}
    assert await made.poll(1) == {"speculative": 0, "greedy": 0}
    assert made.condition("Ready")["message"] == (
        "both pools are idle and scaled to zero; requests wait until an engine has started"
    )
    assert (made.condition("Ready")["status"], made.condition("GreedyPoolReady")["reason"]) == (
        "True",
        "ScaledToZero",
    )
    made.gateways.report("greedy", present=1, queued=1, missed=1)
    assert await made.poll(1) == {"speculative": 0, "greedy": 1}
    assert made.condition("Ready")["message"] == (
        "requests are served by the greedy pool; the speculative pool is idle and scaled to zero"
    )
    made.gateways.report("greedy", present=0, queued=0, served=1)
    assert await made.poll(1) == {"speculative": 0, "greedy": 1}
    assert await made.poll(60) == {"speculative": 0, "greedy": 0}


async def test_a_request_that_the_other_pool_served_instead_starts_the_pool() -> None:
    made = await harness(GREEDY)
    assert await made.poll(60) == {"speculative": 1, "greedy": 0}
    made.gateways.report("speculative", present=5, served=5)
    assert await made.poll(1) == {"speculative": 1, "greedy": 0}
    made.gateways.report("greedy", missed=1)
    assert await made.poll(1) == {"speculative": 1, "greedy": 1}


async def test_a_pool_that_starts_is_not_idle() -> None:
    made = await harness(BOTH)
    await made.poll(60)
    made.gateways.report("greedy", queued=1, present=1)
    made.time += 1
    await made.scaler.once(made.time)
    made.gateways.report("greedy", queued=0, present=0)
    await made.reconcile()  # the Deployment has no ready replica
    made.time += 600
    await made.scaler.once(made.time)
    assert await made.settle() == {"speculative": 0, "greedy": 1}


async def test_requests_that_wait_for_a_pool_that_does_not_become_ready_start_the_other_one() -> None:
    made = await harness(GREEDY)
    assert await made.poll(60) == {"speculative": 1, "greedy": 0}
    made.gateways.report("speculative", present=1, queued=1)
    assert await made.poll_without_ready_engines(1) == {"speculative": 1, "greedy": 0}
    assert await made.poll_without_ready_engines(UNSERVED_SECONDS - 2) == {"speculative": 1, "greedy": 0}
    assert await made.poll_without_ready_engines(1) == {"speculative": 1, "greedy": 1}


async def test_a_new_operator_keeps_pools_scaled_to_zero() -> None:
    made = await harness(BOTH)
    await made.poll(60)
    made.restart()
    assert await made.settle() == {"speculative": 0, "greedy": 0}
    assert await made.poll(1) == {"speculative": 0, "greedy": 0}


async def test_an_operator_that_cannot_read_the_gateways_changes_nothing() -> None:
    made = await harness(BOTH)
    made.gateways.problem = "no gateway is ready"
    assert await made.poll(600) == {"speculative": 1, "greedy": 1}
    assert made.condition("DemandMeasured")["message"] == (
        "no pools are scaled to or from zero, because their demand is unknown: no gateway is ready"
    )


async def test_a_pool_that_was_suspended_starts_when_it_is_needed() -> None:
    made = await harness(BOTH)
    spec = made.cluster.objects["DPSRouter", *KEY]["spec"]
    made.edit({**spec, "suspend": True})
    assert await made.settle() == {"speculative": 0, "greedy": 0}
    await made.poll(1)
    made.edit({**spec, "suspend": False})
    assert await made.settle() == {"speculative": 0, "greedy": 0}
    made.gateways.report("greedy", queued=1, present=1)
    assert await made.poll(1) == {"speculative": 0, "greedy": 1}


async def test_nothing_is_scaled_while_the_router_is_paused() -> None:
    made = await harness(BOTH)
    made.edit({**made.cluster.objects["DPSRouter", *KEY]["spec"], "paused": True})
    assert await made.poll(600) == {"speculative": 1, "greedy": 1}


@pytest.mark.parametrize(("most", "autoscalers"), [(1, []), (3, [(1, 3)])])
def test_autoscaler_never_scales_to_zero_itself(most: int, autoscalers: list[tuple[int, int]]) -> None:
    greedy = {"autoscaling": {"minReplicas": 0, "maxReplicas": most}}
    made = children(
        router({**SMALLEST, "pools": {"speculative": SPECULATIVE, "greedy": greedy}}), SETTINGS, ""
    )
    found = [one["spec"] for one in made if one["kind"] == "HorizontalPodAutoscaler"]
    assert [(one["minReplicas"], one["maxReplicas"]) for one in found] == autoscalers


def test_requests_wait_for_an_engine_only_if_a_pool_may_be_scaled_to_zero() -> None:
    pools = {**SMALLEST["pools"], "greedy": {"autoscaling": {"minReplicas": 0, "maxReplicas": 1}}}
    with_zero = gateway_config(router({**SMALLEST, "pools": pools}))
    own = gateway_config(router({**SMALLEST, "pools": pools, "gateway": {"timeouts": {"wakeSeconds": 60}}}))
    assert with_zero["timeouts"]["wakeSeconds"] == 600
    assert own["timeouts"]["wakeSeconds"] == 60
    assert "wakeSeconds" not in gateway_config(router(SMALLEST))["timeouts"]


def test_activity_of_gateways_is_read_from_their_metrics_and_summed_to_the_demand() -> None:
    found = activities(METRICS)
    assert found == {"speculative": Activity(present=5, queued=2, served=7), "greedy": Activity(missed=4)}
    assert demand({"10.0.0.1": found, "10.0.0.2": found}) == {"speculative": 10, "greedy": 0}


counts = st.integers(0, 5).map(float)
any_activity = st.builds(Activity, present=counts, queued=counts, served=counts, missed=counts)
any_activities = st.fixed_dictionaries(dict.fromkeys(POOLS, any_activity))


@given(st.dictionaries(st.sampled_from("abc"), any_activities), st.sets(st.sampled_from(POOLS)))
def test_pools_are_needed_only_by_requests(now: dict[str, Activities], ready: set[PoolName]) -> None:
    idle = {
        address: {pool: replace(found[pool], present=0.0, queued=0.0) for pool in POOLS}
        for address, found in now.items()
    }
    restarted = {address: {pool: Activity() for pool in POOLS} for address in now}
    for pool in POOLS:
        assert not needed(pool, idle, now, ready)
        assert not needed(pool, idle, {}, ready)
        assert not needed(pool, {}, now, ready)
        assert not needed(pool, restarted, now, ready)
        if any(found[pool].present for found in now.values()):
            assert needed(pool, now, now, ready)
