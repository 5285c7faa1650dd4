"""Turns to decide and answers to learn from, for tests of the policy Adaptive."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_gateway.routing.decision import Observation, PolicyInput, PoolView, PromptTokens

GROWN = PromptTokens(held=3_900, fetchable=0, prefill=100)
"""A prompt of 4,000 tokens in the pool that served the previous turn."""

MOVED = PromptTokens(held=0, fetchable=0, prefill=4_000)
FETCHABLE = PromptTokens(held=0, fetchable=3_900, prefill=100)
"""The same prompt in the other pool, without and with a common prefix cache."""

IDLE = PoolView(
    ready_replicas=1,
    in_flight=0,
    queued=0,
    queued_prefill_tokens=0,
    free_tokens=math.inf,
    running_limit=None,
    replica="engine",
    prompt=GROWN,
)

NOT_EXPLORING = 0.5

prompts = st.builds(PromptTokens, *[st.integers(0, 100_000)] * 3)

replicas = st.sampled_from(["engine", "other"])

views = st.builds(
    PoolView,
    ready_replicas=st.integers(0, 3),
    in_flight=st.floats(0, 200),
    queued=st.floats(0, 200),
    queued_prefill_tokens=st.floats(0, 100_000),
    free_tokens=st.just(math.inf) | st.floats(-100_000, 100_000),
    running_limit=st.none() | st.integers(1, 2048),
    replica=replicas,
    prompt=prompts,
)

turns = st.builds(
    PolicyInput,
    prompt_tokens=st.integers(1, 100_000),
    delta_tokens=st.integers(0, 100_000),
    draw=st.just(NOT_EXPLORING),
    number=st.integers(1, 50),
    last_pool=st.none(),
    pools=st.just({}),
    kind=st.sampled_from(["code", "prose"]),
)

observations = st.builds(
    Observation,
    pool=st.sampled_from(Pool),
    turn=turns,
    view=views,
    cached_tokens=st.none() | st.integers(0, 100_000),
    fetched_tokens=st.none() | st.integers(0, 100_000),
    output_tokens=st.integers(0, 10_000),
    decoding_load=st.floats(0, 200),
    later_prefill_tokens=st.floats(0, 100_000),
    first_token_seconds=st.none() | st.floats(0, 100),
    total_seconds=st.floats(100, 200),
    verifications=st.none() | st.integers(0, 10_000),
)

histories = st.lists(observations, max_size=20)


def turn(speculative: PoolView = IDLE, greedy: PoolView = IDLE, **changed: Any) -> PolicyInput:
    """The second turn of a session, whose prompt grew by 100 tokens."""
    values: dict[str, Any] = {
        "prompt_tokens": 4_000,
        "delta_tokens": 100,
        "draw": NOT_EXPLORING,
        "number": 2,
        "last_pool": None,
        "pools": {Pool.SPECULATIVE: speculative, Pool.GREEDY: greedy},
    }
    return PolicyInput(**(values | changed))


def answer(pool: Pool, seconds_per_token: float, load: float = 0, wait_per_request: float = 0) -> Observation:
    """A streamed answer of 50 tokens on an engine with the given speed."""
    first = 0.05 + wait_per_request * load
    return Observation(
        pool=pool,
        turn=turn(),
        view=replace(IDLE, in_flight=load),
        cached_tokens=3_900,
        fetched_tokens=None,
        output_tokens=50,
        decoding_load=load,
        later_prefill_tokens=0,
        first_token_seconds=first,
        total_seconds=first + 50 * seconds_per_token,
    )


ACCURATE = [
    answer(pool, seconds)
    for _ in range(100)
    for pool, seconds in ((Pool.SPECULATIVE, 0.0070), (Pool.GREEDY, 0.0091))
]
"""Answers of both pools after which their speeds are known."""

STALLED = replace(
    answer(Pool.SPECULATIVE, seconds_per_token=0.007), first_token_seconds=1.0, total_seconds=1.35
)
"""An answer whose first token took longer than anything that has been learned explains."""


def learned(*history: Observation) -> Adaptive:
    """A policy that has observed these answers."""
    policy = Adaptive()
    for each in history:
        policy.observe(each)
    return policy


def predicted(policy: Adaptive, turn: PolicyInput) -> Mapping[Pool, float]:
    """The predicted latency of a turn in each pool, in seconds."""
    decision = policy.decide(turn)
    assert decision.predicted is not None
    return decision.predicted
