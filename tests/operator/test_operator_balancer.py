"""Moves of replicas: when the balancer decides on one, and what the reconciler does about it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_engines.gpu_budget import Demand
from dps_operator.cluster import Cluster
from dps_operator.errors import GatewaysUnreachableError
from dps_operator.gateway_metrics import GatewayMetrics
from dps_operator.gpu_budget.allocation import Allocation
from dps_operator.gpu_budget.balancer import Allocations, Balancer
from dps_operator.gpu_budget.demand import GatewayDemand, demand
from dps_operator.observe import Observations
from dps_operator.reconcile import Reconciler
from dps_operator.work_queue import WorkQueue
from dps_testkit.operator.fake_cluster import FakeCluster
from dps_testkit.operator.objects import READY, finished_rollout, pod
from dps_testkit.operator.routers import SETTINGS, SMALLEST

KEY = ("serving", "qwen")
SPEC: dict[str, Any] = {**SMALLEST, "gpuBudget": {"gpus": 4, "cooldownSeconds": 100}}
METRICS = """\
# TYPE dps_in_flight gauge
dps_in_flight{pool="speculative"} 3.0
dps_in_flight{pool="greedy"} 5.0
# TYPE dps_queued gauge
dps_queued{pool="speculative"} 0.0
dps_queued{pool="greedy"} 2.0
# TYPE dps_ready_replicas gauge
dps_ready_replicas{pool="greedy"} 1.0
"""


class Gateways:
    """Reports `demand`, or fails with `problem`."""

    def __init__(self) -> None:
        self.demand: Demand = {"speculative": 1.0, "greedy": 30.0}
        self.problem = ""
        self.asked: list[str] = []

    async def read(self, addresses: list[str]) -> Demand:
        self.asked = addresses
        if self.problem:
            raise GatewaysUnreachableError(self.problem)
        return self.demand


class BalancerHarness:
    """An operator with one DPSRouter, whose pools have the replicas that their Deployments request."""

    def __init__(self, spec: Mapping[str, Any] = SPEC) -> None:
        self.cluster = FakeCluster()
        self.seen, self.allocations, self.gateways = Observations(), Allocations(), Gateways()
        self.time = 0
        typed: Cluster = self.cluster
        self.reconciler = Reconciler(typed, self.seen, SETTINGS, self.now, self.allocations)
        queue = WorkQueue(self.reconciler.reconcile)
        self.balancer = Balancer(self.seen, queue, self.gateways, self.allocations, self.now)
        body = {"apiVersion": "dpsrouter.io/v1alpha1", "kind": "DPSRouter", "spec": dict(spec)}
        self.cluster.store({**body, "metadata": {"name": KEY[1], "namespace": KEY[0], "generation": 1}})
        self.seen.update_router(self.cluster.objects["DPSRouter", *KEY])
        gateway = pod("gateway-1", "gateway", podIP="10.0.0.1", conditions=[READY])
        self.seen.update_pod(gateway)
        self.cluster.objects["Pod", KEY[0], "gateway-1"] = gateway

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

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.objects["DPSRouter", *KEY]["status"]
        return found

    def condition(self) -> dict[str, str]:
        found: dict[str, str]
        (found,) = [one for one in self.status()["conditions"] if one["type"] == "DemandMeasured"]
        return found

    def measured(self) -> tuple[str, str]:
        return self.condition()["status"], self.condition()["reason"]


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
    harness.gateways.demand = {"speculative": 30.0, "greedy": 1.0}
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
    harness.gateways.demand = {"speculative": 12.0, "greedy": 12.0}
    harness.seen.routers[KEY]["status"] = {"routing": {"recommended": recommended}}
    await harness.settle()
    await harness.measure(110)
    calibrated = rule == "Calibrated"
    assert await harness.settle() == {"speculative": 3 if calibrated else 2, "greedy": 1 if calibrated else 2}
    assert harness.status()["gpuBudget"]["rule"] == rule
    assert ("towards 0.25 times as many requests" in harness.condition()["message"]) == calibrated
    assert ("the same number of requests per replica" in harness.condition()["message"]) != calibrated


async def test_a_new_operator_keeps_the_allocation_of_the_status() -> None:
    harness = BalancerHarness()
    await harness.settle()
    await harness.measure(110)
    await harness.settle()
    harness.allocations.forget(KEY)
    assert await harness.settle() == {"speculative": 1, "greedy": 3}


async def test_no_replica_moves_while_one_is_not_ready() -> None:
    harness = BalancerHarness()
    await harness.settle()
    deployment = ("Deployment", "qwen-greedy")
    found = harness.seen.children(KEY)[deployment]
    assert found.replicas is not None
    harness.seen.children(KEY)[deployment] = replace(found, replicas=replace(found.replicas, settled=False))
    await harness.measure(300)
    assert harness.allocations.decided == {}


@pytest.mark.parametrize("change", [{"paused": True}, {"suspend": True}])
async def test_no_replica_of_a_paused_or_suspended_router_moves(change: dict[str, Any]) -> None:
    harness = BalancerHarness()
    await harness.settle()
    harness.seen.routers[KEY]["spec"] |= change
    if "suspend" in change:
        await harness.settle()
    await harness.measure(300)
    assert harness.allocations.decided == {}


async def test_a_short_burst_moves_nothing() -> None:
    harness = BalancerHarness()
    harness.gateways.demand = {"speculative": 10.0, "greedy": 10.0}
    await harness.settle()
    await harness.measure(200)
    harness.gateways.demand = {"speculative": 10.0, "greedy": 30.0}
    await harness.measure(10)
    harness.gateways.demand = {"speculative": 10.0, "greedy": 10.0}
    await harness.measure(200)
    assert harness.allocations.decided == {}


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
    harness.gateways.demand = {"speculative": 0.0, "greedy": 0.0}
    await harness.settle()
    await harness.measure(10)
    await harness.settle()
    before = harness.cluster.writes()
    await harness.measure(500)
    await harness.settle()
    assert harness.cluster.writes() == before


async def test_a_budget_that_is_removed_while_the_demand_is_unknown_is_forgotten() -> None:
    harness = BalancerHarness()
    await harness.settle()
    await harness.measure(110)
    assert await harness.settle() == {"speculative": 1, "greedy": 3}
    harness.gateways.problem = "no gateway is ready"
    await harness.measure(10)
    budget = harness.seen.routers[KEY]["spec"].pop("gpuBudget")
    await harness.settle()
    await harness.measure(10)
    harness.seen.routers[KEY]["spec"]["gpuBudget"] = budget
    assert await harness.settle() == {"speculative": 2, "greedy": 2}
    assert harness.measured() == ("Unknown", "NotMeasured")


async def test_a_changed_budget_applies_to_a_decision_that_is_not_in_the_status_yet() -> None:
    harness = BalancerHarness()
    await harness.settle()
    harness.allocations.decided[KEY] = Allocation(1, 3, harness.now())
    harness.seen.routers[KEY]["spec"]["gpuBudget"] = {"gpus": 2}
    assert await harness.settle() == {"speculative": 1, "greedy": 1}


def test_demand_is_the_number_of_requests_in_flight_and_waiting() -> None:
    assert demand(METRICS) == {"speculative": 3.0, "greedy": 7.0}


async def test_demand_is_summed_over_gateways() -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        assert server.port is not None
        reader = GatewayDemand(GatewayMetrics(session, server.port))
        assert await reader.read(["127.0.0.1", "127.0.0.1"]) == {"speculative": 6.0, "greedy": 14.0}


async def test_a_gateway_that_does_not_answer_makes_the_demand_unknown() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(GatewaysUnreachableError, match="no gateway is ready"):
            await GatewayDemand(GatewayMetrics(session)).read([])
        with pytest.raises(
            GatewaysUnreachableError, match="port 1 of a gateway does not answer the operator"
        ):
            await GatewayDemand(GatewayMetrics(session, 1)).read(["127.0.0.1"])
