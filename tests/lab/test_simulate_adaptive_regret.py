"""The policy `Adaptive` where its assumptions are wrong: engines of another speed, other traffic.

Regret is the excess of the mean session latency over that of the best static policy in the whole run, so that it
includes the time in which the policy learns.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_lab.simulate.compare import regret
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.roofline import speculation
from dps_lab.simulate.run import Load, Scenario, simulate
from dps_lab.simulate.trace import SessionTrace
from dps_lab.simulate.workloads import load_workload

BOTH = dict.fromkeys(Pool, 1)
SHORT = random.Random(5).sample(load_workload("bfcl"), 60)
LONG = random.Random(5).sample(load_workload("toolbench"), 20)

LIMIT = 0.05


def adaptive_regret(sessions: Sequence[SessionTrace], fleet: FleetSpec) -> float:
    scenario = Scenario(fleet, Adaptive(), Load(concurrency=8), seed=5)
    return regret(sessions, scenario, simulate(sessions, scenario))


@pytest.mark.parametrize("serialized", [False, True], ids=["batched", "serialized"])
@pytest.mark.parametrize(
    "fleet",
    [
        FleetSpec(BOTH, hardware=HARDWARE["a100-70b"]),
        FleetSpec(BOTH, speculation=speculation("STANDALONE", 1.0)),
    ],
    ids=["larger model", "no draft accepted"],
)
def test_wrong_priors_cost_little(fleet: FleetSpec, serialized: bool) -> None:
    assert adaptive_regret(SHORT, replace(fleet, serialized=serialized)) <= LIMIT


@pytest.mark.parametrize("sessions", [SHORT + LONG, LONG + SHORT], ids=["longer", "shorter"])
def test_change_to_other_traffic_costs_little(sessions: list[SessionTrace]) -> None:
    assert adaptive_regret(sessions, FleetSpec(BOTH)) <= LIMIT
