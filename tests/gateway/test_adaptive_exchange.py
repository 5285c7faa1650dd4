"""The exchange of what the policy Adaptive has learned between gateway replicas."""

import json
from typing import Any

import pytest

from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_gateway.routing.learned import COUNTED_TURNS
from tests.gateway.adaptive_turns import answer, learned, predicted, turn


def test_replica_that_absorbs_a_document_predicts_as_if_it_had_observed_the_answers() -> None:
    history = [answer(pool, 0.02, load=load) for pool in Pool for load in range(5)]
    own, other = Adaptive(), learned(*history)
    own.absorb([json.loads(json.dumps(other.export()))])
    assert predicted(own, turn()) == pytest.approx(predicted(other, turn()), rel=0.05)


def test_absorbed_documents_replace_those_absorbed_before() -> None:
    document = learned(*(answer(Pool.GREEDY, 0.05) for _ in range(50))).export()
    once, twice = Adaptive(), Adaptive()
    once.absorb([document])
    twice.absorb([document])
    twice.absorb([document])
    assert predicted(twice, turn()) == pytest.approx(predicted(once, turn()))
    twice.absorb([])
    assert predicted(twice, turn()) == pytest.approx(predicted(Adaptive(), turn()))


def test_export_contains_only_own_observations() -> None:
    policy = Adaptive()
    before = policy.export()
    policy.absorb([learned(answer(Pool.GREEDY, 0.05)).export()])
    assert policy.export() == before


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"version": 0},
        {"version": 1, "pools": [], "workload": []},
        Adaptive().export() | {"workload": [float("nan"), *[1] * COUNTED_TURNS]},
        Adaptive().export() | {"workload": [256, 1, 1]},
        Adaptive().export() | {"pools": {"speculative": {}, "greedy": {}}},
    ],
    ids=["empty", "another version", "other types", "not a number", "missing counts", "missing sums"],
)
def test_documents_that_are_not_valid_are_ignored(document: dict[str, Any]) -> None:
    policy = Adaptive()
    policy.absorb([document])
    assert predicted(policy, turn()) == pytest.approx(predicted(Adaptive(), turn()))
