"""What API keys may use at the same time and per minute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.auth import Key, KeyBusy, KeyExhausted, KeyLimits
from dps_testkit.clock import ManualClock

MINUTE = 60.0


def answered(limits: KeyLimits, key: Key, tokens: int = 0) -> int | None:
    """Serve a request. Returns None, or after how many seconds it should be sent again because it was refused."""
    try:
        limits.enter(key)
    except KeyExhausted as error:
        return error.retry_after_seconds
    limits.leave(key, tokens)
    return None


def test_requests_per_minute_are_limited() -> None:
    clock = ManualClock(1000 * MINUTE)
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
    clock = ManualClock(1000 * MINUTE)
    limits, key = KeyLimits(clock=clock), Key("t", b"1", tokens_per_minute=1000)
    assert [answered(limits, key, 600) for _ in range(3)] == [None, None, 71]
    with pytest.raises(KeyExhausted, match="at most 1000 tokens per minute"):
        limits.enter(key)
    clock.now += 71
    assert answered(limits, key, 600) is None


def test_refused_requests_do_not_count() -> None:
    limits = KeyLimits(clock=ManualClock(1000 * MINUTE))
    key = Key("t", b"1", max_in_flight=1, requests_per_minute=2)
    limits.enter(key)
    for _ in range(5):
        with pytest.raises(KeyBusy, match="at most 1 requests in flight"):
            limits.enter(key)
    limits.enter(Key("t", b"2", max_in_flight=1))
    limits.leave(key)
    assert [answered(limits, key) for _ in range(3)] == [None, 61, 61]
    limits.enter(Key("t", b"1"))  # a key without limits


@given(
    st.lists(st.tuples(st.floats(0, 90), st.integers(0, 400)), min_size=1, max_size=30), st.integers(1, 1000)
)
def test_request_is_accepted_after_the_time_that_its_refusal_states(
    requests: list[tuple[float, int]], limit: int
) -> None:
    clock = ManualClock(1000 * MINUTE)
    limits, key = KeyLimits(clock=clock), Key("t", b"1", requests_per_minute=5, tokens_per_minute=limit)
    for pause, tokens in requests:
        clock.now += pause
        for _ in range(3):  # one limit after the other may be reached
            wait = answered(limits, key, tokens)
            if wait is None:
                break
            clock.now += wait
        assert wait is None
