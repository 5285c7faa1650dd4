"""Moves of replicas: when the autoscaler decides on one, and what the reconciler does about it."""

from dataclasses import replace
from typing import Any

import pytest

from dps_operator.autoscale import Autoscaler
from dps_operator.work_queue import WorkQueue
from dps_testkit.operator.routers import SMALLEST
from tests.operator.harness import KEY, FakeGateways, OperatorHarness
from tests.operator.objects import READY, finished_rollout, pod

SPEC: dict[str, Any] = {**SMALLEST, "gpuBudget": {"gpus": 4, "cooldownSeconds": 100}}


class BalancerHarness(OperatorHarness):
    """An operator with one DPSRouter, whose pools have the replicas that their Deployments request."""

    def __init__(self, spec: dict[str, Any] = SPEC) -> None:
        self.gateways, self.time = FakeGateways(), 0
        self.demand(1.0, 30.0)
        super().__init__(dict(spec), self.now)
        queue = WorkQueue(self.reconciler.reconcile)
        self.balancer = Autoscaler(self.seen, queue, self.gateways, self.now)
        gateway = pod("gateway-1", "gateway", podIP="10.0.0.1", conditions=[READY])
        self.seen.update_router(self.cluster.objects["DPSRouter", *KEY])
        self.seen.update_pod(gateway)
        self.cluster.objects["Pod", KEY[0], "gateway-1"] = gateway

    def demand(self, speculative: float, greedy: float) -> None:
        """Report this number of requests for each pool."""
        self.gateways.report("speculative", present=speculative)
        self.gateways.report("greedy", present=greedy)

    def now(self) -> str:
        return f"2026-01-01T00:{self.time // 60:02}:{self.time % 60:02}Z"

    async def settle(self) -> dict[str, int]:
        """Reconcile, start and stop pods as requested, until nothing changes; returns the replicas."""
        for _ in range(4):
            await self.reconciler.reconcile(KEY)
            for pool in ("speculative", "greedy"):
                live = self.cluster.objects["Deployment", KEY[0], f"qwen-{pool}"]
                count = live["spec"]["replicas"]
                live["status"] = finished_rollout(live, count)
                self.seen.update_child(live)
                for number in range(4):
                    engine = pod(f"{pool}-{number}", "greedy" if pool == "greedy" else "speculative")
                    self.seen.update_pod(engine, deleted=number >= count)
        return self.replicas()

    def replicas(self) -> dict[str, int]:
        return {
            pool: self.cluster.objects["Deployment", KEY[0], f"qwen-{pool}"]["spec"]["replicas"]
            for pool in ("speculative", "greedy")
        }

    async def measure(self, seconds: int) -> None:
        """Measure every 10 s for this long."""
        for _ in range(0, seconds, 10):
            self.time += 10
            await self.balancer.once(self.time)

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
    harness.seen.routers[KEY]["status"] = {"routing": {"recommended": recommended}}
    await harness.settle()
    await harness.measure(110)
    calibrated = rule == "Calibrated"
    assert await harness.settle() == {"speculative": 3 if calibrated else 2, "greedy": 1 if calibrated else 2}
    assert harness.status()["gpuBudget"]["rule"] == rule
    assert (
        "towards 0.25 times as many requests" in harness.condition("DemandMeasured")["message"]
    ) == calibrated
    assert (
        "the same number of requests per replica" in harness.condition("DemandMeasured")["message"]
    ) != calibrated


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
    harness.seen.routers[KEY]["spec"] |= change
    if "suspend" in change:
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
