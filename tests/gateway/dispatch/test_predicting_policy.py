"""Requests that the policy Adaptive routes, and what it learns from them."""

import asyncio

import pytest

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import CacheUnits, LearningPolicy
from dps_gateway.routing.policies import AlwaysGreedy
from dps_gateway.upstream.replica import Configuration
from tests.gateway.dispatch.gateway_with_pools import Start, engines
from tests.gateway.servers import configure, until


async def test_turn_that_another_pool_served_after_a_failure_is_not_learned_from(start: Start) -> None:
    """The failed attempt is part of the turn's duration."""
    learned = {}
    for failing, healthy in ((0, 1), (1, 0)):  # one of them is the pool that the policy chooses
        pools = {failing: engines(1, status=503), healthy: engines(1)}
        gateway = await start(pools[0], pools[1], policy="Adaptive")
        policy = gateway.runtime.policy
        assert isinstance(policy, LearningPolicy)
        before = policy.export()
        response = await gateway.post()
        assert response.status == 200
        learned[response.headers["x-dps-reason"]] = policy.export() != before
    assert learned == {"failover": False, "predicted_faster": True}


async def test_turn_of_a_predicting_policy_goes_to_the_other_pool_if_the_chosen_one_is_full(
    start: Start,
) -> None:
    gateway = await start(
        engines(1, delay=1.0), engines(1, delay=1.0), policy="Adaptive", limits="{maxInFlightPerReplica: 1}"
    )
    answers = await asyncio.gather(*(gateway.post(number) for number in range(2)))
    assert {answer.headers["x-dps-pool"] for answer in answers} == {"speculative", "greedy"}
    assert {answer.headers["x-dps-reason"] for answer in answers} <= {"predicted_faster", "fixed", "overload"}


async def test_reloaded_configuration_keeps_what_the_policy_has_learned(start: Start) -> None:
    gateway = await start(engines(1), engines(1), policy="Adaptive")
    policy = gateway.runtime.policy
    configure(gateway.runtime, "limits", max_queued=1)
    assert gateway.runtime.policy is policy
    configure(gateway.runtime, "routing", policy="AlwaysGreedy")
    assert gateway.runtime.policy == AlwaysGreedy()


@pytest.mark.parametrize(
    ("units", "fetches"),
    [
        pytest.param(CacheUnits(), True, id="single tokens"),
        pytest.param(CacheUnits(page_tokens=64), True, id="pages"),
        pytest.param(
            CacheUnits(fetch_threshold_tokens=10_000), False, id="a prefix that is too short to fetch"
        ),
    ],
)
async def test_tokens_that_a_pool_fetches_are_not_queued_for_prefill(
    start: Start, units: CacheUnits, fetches: bool
) -> None:
    """A session whose first turn the greedy pool has answered is repeated in the speculative pool."""
    gateway = await start(engines(1, delay=1.0), engines(1), policy="AlwaysGreedy", common_prefix_cache=True)
    messages = [{"role": "user", "content": "hello " * 1000}]
    await gateway.post(stream=True, messages=messages)
    configure(gateway.runtime, "routing", policy="AlwaysSpeculative")
    (replica,) = gateway.runtime.pools[Pool.SPECULATIVE].replicas.values()
    replica.configuration = Configuration(units)
    messages += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "on"}]
    waiting = asyncio.create_task(gateway.post(stream=True, messages=messages))
    await until(lambda: replica.in_flight > 0, "the request is in flight")
    queued = replica.prefill_tokens
    response = await waiting
    length, growth = (int(response.headers[f"x-dps-{name}-tokens"]) for name in ("prompt", "delta"))
    assert growth < 256
    assert queued == length - (units.whole_pages(length - growth) if fetches else 0)
    assert replica.prefill_tokens == 0
