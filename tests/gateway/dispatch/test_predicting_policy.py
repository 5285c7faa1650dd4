"""Requests that the policy Adaptive routes, and what it learns from them."""

import asyncio

import pytest
from aiohttp import ClientResponse

from dps_gateway.config import Limits, Routing
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import CacheUnits, LearningPolicy
from dps_gateway.routing.policies import AlwaysGreedy
from dps_gateway.upstream.replica import Configuration
from dps_testkit.waiting import wait_until
from tests.gateway.dispatch.gateway_with_pools import Start, engines


def predicted(response: ClientResponse) -> dict[str, float]:
    """The predictions in a response header, in seconds by pool."""
    pairs = (pair.split("=") for pair in response.headers["x-dps-predicted"].split(","))
    return {pool: float(seconds) for pool, seconds in pairs}


async def test_predicting_policy_reports_what_it_predicts_for_each_pool(start: Start) -> None:
    gateway = await start(engines(1), engines(1), policy="Adaptive")
    response = await gateway.post()
    assert response.headers["x-dps-reason"] == "predicted_faster"
    seconds = predicted(response)
    assert list(seconds) == ["speculative", "greedy"]
    assert min(seconds.values()) > 0
    assert "x-dps-predicted" not in (await (await start(engines(1), engines(1))).post()).headers


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


async def test_completed_turns_are_learned_from_and_their_prediction_errors_counted(start: Start) -> None:
    gateway = await start(engines(1), engines(1), policy="Adaptive")
    policy, metrics = gateway.runtime.policy, gateway.runtime.metrics
    assert isinstance(policy, LearningPolicy)
    before = policy.export()
    await gateway.post(stream=False)
    assert policy.export() != before
    counts = [
        metrics.registry.get_sample_value("dps_prediction_error_seconds_count", {"pool": pool}) or 0
        for pool in ("speculative", "greedy")
    ]
    assert sum(counts) == 1


async def test_reloaded_configuration_keeps_what_the_policy_has_learned(start: Start) -> None:
    gateway = await start(engines(1), engines(1), policy="Adaptive")
    runtime = gateway.runtime
    policy = runtime.policy
    runtime.apply(runtime.config.model_copy(update={"limits": Limits.model_validate({"maxQueued": 1})}))
    assert runtime.policy is policy
    runtime.apply(
        runtime.config.model_copy(update={"routing": Routing.model_validate({"policy": "AlwaysGreedy"})})
    )
    assert runtime.policy == AlwaysGreedy()


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
    routing = gateway.runtime.config.routing.model_copy(update={"policy": "AlwaysSpeculative"})
    gateway.runtime.apply(gateway.runtime.config.model_copy(update={"routing": routing}))
    (replica,) = gateway.runtime.pools[Pool.SPECULATIVE].replicas.values()
    replica.configuration = Configuration(units)
    messages += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "on"}]
    waiting = asyncio.create_task(gateway.post(stream=True, messages=messages))

    async def sent() -> bool:
        return replica.in_flight > 0

    await wait_until(sent, "the request is in flight")
    queued = replica.prefill_tokens
    response = await waiting
    length, growth = (int(response.headers[f"x-dps-{name}-tokens"]) for name in ("prompt", "delta"))
    assert growth < 256
    assert queued == length - (units.whole_pages(length - growth) if fetches else 0)
    assert replica.prefill_tokens == 0
