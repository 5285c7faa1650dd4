"""The policy `Adaptive` where its assumptions are wrong: engines of another speed, engines that drift, other traffic.

Regret is the excess of the mean session latency over that of the best static policy in the whole run, so that it
includes the time in which the policy learns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.grid import BOTH, sample
from dps_lab.simulate.hardware import HARDWARE
from dps_lab.simulate.regret import regret
from dps_lab.simulate.roofline import speculation
from dps_lab.simulate.run import Change, Load, Scenario, simulate
from dps_lab.simulate.trace import SessionTrace
from dps_lab.simulate.workloads import load_workload

SHORT = sample(load_workload("bfcl"), 60, seed=5)
LONG = sample(load_workload("toolbench"), 20, seed=5)

LIMIT = 0.05

SECONDS = 1.2
"""Between two steps of a drift, which ends with the run of SHORT."""


def adaptive_regret(
    sessions: Sequence[SessionTrace], fleet: FleetSpec, changes: tuple[Change, ...] = ()
) -> float:
    scenario = Scenario(fleet, Adaptive(), Load(concurrency=8), seed=5, changes=changes)
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


@pytest.mark.parametrize(
    "drift",
    [
        lambda step: Change(0.0, pool=Pool.SPECULATIVE, acceptance_length=4 - 0.3 * step),
        lambda step: Change(0.0, pool=Pool.GREEDY, slowdown=1 + 0.3 * step),
    ],
    ids=[
        "acceptance falls from 4 to 1",
        "greedy engine slows down by a factor of 4",
    ],
)
def test_drift_of_an_engine_costs_little(drift: Callable[[int], Change]) -> None:
    changes = tuple(replace(drift(step), at_seconds=SECONDS * step) for step in range(11))
    assert adaptive_regret(SHORT, FleetSpec(BOTH), changes) <= LIMIT


@pytest.mark.parametrize("sessions", [SHORT + LONG, LONG + SHORT], ids=["longer", "shorter"])
def test_change_to_other_traffic_costs_little(sessions: list[SessionTrace]) -> None:
    assert adaptive_regret(sessions, FleetSpec(BOTH)) <= LIMIT
