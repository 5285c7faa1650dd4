"""Moves of replicas: when the autoscaler decides on one, and what the reconciler does about it."""

from dataclasses import replace
from typing import Any

import pytest

from dps_testkit.operator.routers import SMALLEST
from tests.operator.harness import KEY, ScalingHarness

SPEC: dict[str, Any] = {**SMALLEST, "gpuBudget": {"gpus": 4, "cooldownSeconds": 100}}


class BalancerHarness(ScalingHarness):
    """A DPSRouter with a GPU budget, and more requests for the greedy pool."""

    def __init__(self, spec: dict[str, Any] = SPEC) -> None:
        super().__init__(spec)
        self.demand(1.0, 30.0)

    def demand(self, speculative: float, greedy: float) -> None:
        """Report this number of requests for each pool."""
        self.gateways.report("speculative", present=speculative)
        self.gateways.report("greedy", present=greedy)

    async def measure(self, seconds: int) -> None:
        """Measure every 10 s for this long."""
        for _ in range(0, seconds, 10):
            self.time += 10
            await self.scaler.once(self.time)

    def measured(self) -> tuple[str, str]:
        condition = self.condition("DemandMeasured")
        return condition["status"], condition["reason"]


async def test_a_replica_moves_after_the_cooldown_and_the_next_after_another() -> None:
    harness = BalancerHarness()
    assert await harness.settle() == {"speculative": 2, "greedy": 2}
    assert harness.measured() == ("Unknown", "NotMeasured")
    await harness.measure(100)
    assert await harness.settle() == {"speculative": 2, "greedy": 2}
    assert harness.measured() == ("True", "Measured")
    await harness.measure(10)
    assert await harness.settle() == {"speculative": 1, "greedy": 3}
    assert harness.gateways.asked == ["10.0.0.1"]
    moved_at = "2026-01-01T00:01:50Z"
    expected = {
        "speculativeReplicas": 1,
        "greedyReplicas": 3,
        "lastMoveTime": moved_at,
        "rule": "EqualLoad",
    }
    assert harness.status()["gpuBudget"] == expected
    harness.demand(30.0, 1.0)
    await harness.measure(90)
    assert await harness.settle() == {"speculative": 1, "greedy": 3}
    await harness.measure(10)
    assert await harness.settle() == {"speculative": 2, "greedy": 2}


RECOMMENDED: dict[str, Any] = {
    "policy": "DeltaPrefill",
    "thresholdTokens": 128,
    "objective": "session",
    "seconds": 1.25,
    "verdict": "Two pools are the right answer.",
    "gpuBudget": {"speculativeReplicas": 3, "greedyReplicas": 1, "loadRatio": 0.25},
    "time": "2026-01-01T00:00:00Z",
}
BUDGETS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "applied": ({"apply": True}, RECOMMENDED, "Calibrated"),
    "only reported": ({}, RECOMMENDED, "EqualLoad"),
    "of another budget": (
        {"apply": True},
        {**RECOMMENDED, "gpuBudget": {**RECOMMENDED["gpuBudget"], "greedyReplicas": 4}},
        "EqualLoad",
    ),
    "of another release": (
        {"apply": True},
        {name: value for name, value in RECOMMENDED.items() if name != "gpuBudget"},
        "EqualLoad",
    ),
}


@pytest.mark.parametrize(("calibration", "recommended", "rule"), BUDGETS.values(), ids=BUDGETS.keys())
async def test_replicas_move_by_the_calibrated_rule_if_it_is_applied_and_of_this_budget(
    calibration: dict[str, Any], recommended: dict[str, Any], rule: str
) -> None:
    harness = BalancerHarness({**SPEC, "routing": {"calibration": calibration}})
    harness.demand(12.0, 12.0)
    harness.cluster.objects["DPSRouter", *KEY]["status"] = {"routing": {"recommended": recommended}}
    await harness.settle()
    await harness.measure(110)
    replicas, text = {
        "Calibrated": ({"speculative": 3, "greedy": 1}, "towards 0.25 times as many requests"),
        "EqualLoad": ({"speculative": 2, "greedy": 2}, "the same number of requests per replica"),
    }[rule]
    assert await harness.settle() == replicas
    assert harness.status()["gpuBudget"]["rule"] == rule
    assert text in harness.condition("DemandMeasured")["message"]


async def test_a_new_operator_keeps_the_allocation_of_the_status() -> None:
    harness = BalancerHarness()
    await harness.settle()
    await harness.measure(110)
    await harness.settle()
    del harness.seen.allocations[KEY]
    assert await harness.settle() == {"speculative": 1, "greedy": 3}


async def test_no_replica_moves_while_one_is_not_ready() -> None:
    harness = BalancerHarness()
    await harness.settle()
    deployment = ("Deployment", "qwen-greedy")
    found = harness.seen.children(KEY)[deployment]
    harness.seen.children(KEY)[deployment] = replace(found, replicas=replace(found.replicas, settled=False))
    await harness.measure(300)
    assert harness.seen.allocations == {}


@pytest.mark.parametrize("change", [{"paused": True}, {"suspend": True}])
async def test_no_replica_of_a_paused_or_suspended_router_moves(change: dict[str, Any]) -> None:
    harness = BalancerHarness()
    await harness.settle()
    harness.edit({**SPEC, **change})
    await harness.settle()
    await harness.measure(300)
    assert harness.seen.allocations == {}


async def test_a_short_burst_moves_nothing() -> None:
    harness = BalancerHarness()
    harness.demand(10.0, 10.0)
    await harness.settle()
    await harness.measure(200)
    harness.demand(10.0, 30.0)
    await harness.measure(10)
    harness.demand(10.0, 10.0)
    await harness.measure(200)
    assert harness.seen.allocations == {}


async def test_an_unknown_demand_is_a_condition_and_restarts_the_measurement() -> None:
    harness = BalancerHarness()
    await harness.settle()
    await harness.measure(60)
    harness.gateways.problem = "no gateway is ready"
    await harness.measure(10)
    await harness.settle()
    assert harness.measured() == ("False", "GatewaysUnreachable")
    harness.gateways.problem = ""
    await harness.measure(90)
    assert await harness.settle() == {"speculative": 2, "greedy": 2}
    assert harness.measured() == ("True", "Measured")


async def test_a_measurement_that_changes_no_condition_writes_nothing() -> None:
    harness = BalancerHarness()
    harness.demand(0.0, 0.0)
    await harness.settle()
    await harness.measure(10)
    await harness.settle()
    before = harness.cluster.writes()
    await harness.measure(500)
    await harness.settle()
    assert harness.cluster.writes() == before
