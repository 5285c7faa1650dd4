"""Regret: how much slower a policy is than the best static policy on the same fleet and load.

This module performs no I/O.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Final

from dps_gateway.pool import Pool
from dps_gateway.routing.policies import AlwaysGreedy, AlwaysSpeculative, DeltaPrefill, Sticky
from dps_lab.simulate.report import session_seconds
from dps_lab.simulate.run import Scenario, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace

STATIC_POLICIES: Final = (
    AlwaysGreedy(),
    AlwaysSpeculative(),
    DeltaPrefill(64),
    DeltaPrefill(128),
    DeltaPrefill(512),
    DeltaPrefill(2048),
    Sticky(),
)
"""The alternatives that a policy is compared with."""


def regret(sessions: Sequence[SessionTrace], scenario: Scenario, results: Sequence[TurnResult]) -> float:
    """The relative increase of the mean session latency of `results` over that of the best alternative.

    0 if no alternative is faster, or if the fleet has only one kind of engine and there is no routing decision.
    """
    if not all(scenario.fleet.engines[pool] for pool in Pool):
        return 0.0
    own = fmean(session_seconds(results))
    others = (
        fmean(session_seconds(simulate(sessions, replace(scenario, policy=policy))))
        for policy in STATIC_POLICIES
        if policy != scenario.policy
    )
    return own / min(own, *others) - 1
