"""What API keys may use at the same time and per minute."""

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.auth import Key, digest_of
from dps_gateway.config import GatewayConfig
from dps_gateway.key_limits import KeyBusy, KeyExhausted, KeyLimits
from dps_gateway.runtime import Runtime
from dps_gateway.shared_counts import MAX_NAMES, MINUTES_SUFFIX, SUFFIX, SharedCounts
from dps_testkit.tokenizers import shared_tokenizer

MINUTE = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000 * MINUTE

    def __call__(self) -> float:
        return self.now


def test_requests_in_flight_are_limited_for_each_key() -> None:
    limits, one, other = KeyLimits(), Key("t", b"1", max_in_flight=1), Key("t", b"2", max_in_flight=1)
    limits.enter(one)
    with pytest.raises(KeyBusy, match="at most 1 requests in flight"):
        limits.enter(one)
    limits.enter(other)
    limits.leave(one)
    limits.enter(one)


def workers_config() -> GatewayConfig:
    pool = {"endpoints": ["http://127.0.0.1:1"]}
    return GatewayConfig.model_validate(
        {
            "listen": {"workers": 2},
            "model": {"name": "m", "tokenizer": "x"},
            "pools": {"speculative": pool, "greedy": pool},
        }
    )


async def test_workers_of_a_gateway_share_the_limit_of_a_key(tmp_path: Path) -> None:
    first, second = (
        Runtime(workers_config(), shared_tokenizer(), tmp_path / f"{pid}.sock") for pid in (1, 2)
    )
    key, other = (Key("t", digest_of(text), max_in_flight=3) for text in ("one", "other"))
    for _ in range(3):  # even if all of them are on connections to one worker
        first.key_limits.enter(key)
        second.key_limits.enter(other)
    for limits, busy in ((second.key_limits, key), (first.key_limits, key), (first.key_limits, other)):
        with pytest.raises(KeyBusy, match="at most 3 requests in flight"):
            limits.enter(busy)
    first.key_limits.leave(key)
    second.key_limits.enter(key)
    with pytest.raises(KeyBusy):
        first.key_limits.enter(key)
    await second.close()
    (tmp_path / f"2{SUFFIX}").unlink()  # as after the death of a worker
    first.key_limits.enter(key)
    with pytest.raises(KeyBusy):
        first.key_limits.enter(key)
    await first.close()


async def test_limits_per_minute_leave_room_for_the_other_counts_of_workers(tmp_path: Path) -> None:
    first, second = (
        Runtime(workers_config(), shared_tokenizer(), tmp_path / f"{pid}.sock") for pid in (1, 2)
    )
    for number in range(2 * MAX_NAMES):
        key = Key("t", digest_of(f"{number}"), requests_per_minute=9)
        first.key_limits.enter(key)
        first.key_limits.leave(key)
    for busy in (Key("t", digest_of(text), max_in_flight=1) for text in ("one", "other")):
        first.key_limits.enter(busy)
        with pytest.raises(KeyBusy):
            second.key_limits.enter(busy)
    for each in (first, second):
        await each.close()


def answered(limits: KeyLimits, key: Key, tokens: int = 0) -> int | None:
    """Serve a request. Returns None, or after how many seconds it should be sent again because it was refused."""
    try:
        limits.enter(key)
    except KeyExhausted as error:
        return error.retry_after_seconds
    limits.leave(key, tokens)
    return None


def test_requests_per_minute_are_limited() -> None:
    clock = Clock()
    limits, key = KeyLimits(clock=clock), Key("t", b"1", requests_per_minute=4)
    clock.now += MINUTE / 2
    assert [answered(limits, key) for _ in range(5)] == [None] * 4 + [31]
    with pytest.raises(KeyExhausted, match="at most 4 requests per minute"):
        limits.enter(key)
    clock.now += 29
    assert answered(limits, key) == 2
    clock.now += 2
    assert [answered(limits, key) for _ in range(2)] == [None, 15]
    clock.now += 5 * MINUTE
    assert [answered(limits, key) for _ in range(5)] == [None] * 4 + [60]


def test_tokens_per_minute_are_limited() -> None:
    clock = Clock()
    limits, key = KeyLimits(clock=clock), Key("t", b"1", tokens_per_minute=1000)
    assert [answered(limits, key, 600) for _ in range(3)] == [None, None, 71]
    with pytest.raises(KeyExhausted, match="at most 1000 tokens per minute"):
        limits.enter(key)
    clock.now += 71
    assert answered(limits, key, 600) is None


def test_refused_requests_do_not_count() -> None:
    limits = KeyLimits(clock=Clock())
    key = Key("t", b"1", max_in_flight=1, requests_per_minute=2)
    limits.enter(key)
    for _ in range(5):
        with pytest.raises(KeyBusy):
            limits.enter(key)
    limits.leave(key)
    assert [answered(limits, key) for _ in range(3)] == [None, 61, 61]
    limits.enter(Key("t", b"1"))  # a key without limits


@given(
    st.lists(st.tuples(st.floats(0, 90), st.integers(0, 400)), min_size=1, max_size=30), st.integers(1, 1000)
)
def test_request_is_accepted_after_the_time_that_its_refusal_states(
    requests: list[tuple[float, int]], limit: int
) -> None:
    clock = Clock()
    limits, key = KeyLimits(clock=clock), Key("t", b"1", requests_per_minute=5, tokens_per_minute=limit)
    for pause, tokens in requests:
        clock.now += pause
        for _ in range(3):  # one limit after the other may be reached
            wait = answered(limits, key, tokens)
            if wait is None:
                break
            clock.now += wait
        assert wait is None


def test_workers_share_the_limits_per_minute_and_forget_past_minutes(tmp_path: Path) -> None:
    clock = Clock()
    key = Key("t", digest_of("key"), requests_per_minute=4)
    with (
        closing(SharedCounts(tmp_path / f"1{MINUTES_SUFFIX}")) as first,
        closing(SharedCounts(tmp_path / f"2{MINUTES_SUFFIX}")) as second,
    ):
        one, other = KeyLimits(minutes=first, clock=clock), KeyLimits(minutes=second, clock=clock)
        assert [answered(limits, key) for limits in (one, other, other, one)] == [None] * 4
        assert (answered(one, key), answered(other, key)) == (61, 61)
        free = len(first._free)
        for _ in range(10):
            clock.now += 2 * MINUTE
            assert answered(one, key) is None
        assert len(first._free) == free
