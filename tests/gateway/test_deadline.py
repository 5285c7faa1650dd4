"""When the time of a request is over."""

import time

import pytest

from dps_gateway.upstream.deadline import TIMER_SECONDS, Deadline


@pytest.mark.parametrize(
    ("left_seconds", "of_client", "expected"),
    [
        pytest.param(-1.0, True, True, id="over"),
        pytest.param(TIMER_SECONDS / 2, True, True, id="a timer for its end may have fired"),
        pytest.param(60.0, True, False, id="not over"),
        pytest.param(-1.0, False, False, id="limit of the configuration"),
    ],
)
def test_failure_is_attributed_to_the_clients_limit(
    left_seconds: float, of_client: bool, expected: bool
) -> None:
    deadline = Deadline(1.0, time.monotonic() + left_seconds, of_client=of_client)
    assert deadline.passed_for_client is expected


def test_elapsed_time_counts_for_a_limit_of_the_client_that_is_longer_than_that_of_the_gateway() -> None:
    deadline = Deadline.of(60.0, 70.0, elapsed_seconds=20.0)
    assert deadline.of_client
    assert deadline.left_seconds == pytest.approx(50.0, abs=1.0)
