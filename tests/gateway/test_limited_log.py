"""Messages about a condition that holds for many requests."""

import pytest

from dps_gateway.upstream.exchange import LOG_SECONDS, LimitedLog
from dps_testkit.clock import ManualClock


def test_errors_are_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    log = LimitedLog(clock)
    for number in range(3):
        log.error("error %d", number)
        clock.now += LOG_SECONDS / 2
    assert caplog.messages == ["error 0", "error 2"]
