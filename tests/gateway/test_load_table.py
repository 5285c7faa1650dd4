"""The table of `dps top`: sums over gateway replicas, rates and means over an interval."""

import pytest

from dps_gateway.commands.load_table import Interval, Reading, load_table
from dps_gateway.commands.top import main

BEFORE = """
dps_route_decisions_total{pool="speculative",reason="within_threshold"} 100
dps_route_decisions_total{pool="greedy",reason="over_threshold"} 50
dps_history_total{kind="grown"} 90
dps_time_to_first_token_seconds_sum{pool="speculative"} 10
dps_time_to_first_token_seconds_count{pool="speculative"} 100
"""
NOW = """
dps_route_decisions_total{pool="speculative",reason="within_threshold"} 114
dps_route_decisions_total{pool="speculative",reason="failover"} 1
dps_route_decisions_total{pool="greedy",reason="over_threshold"} 55
dps_history_total{kind="grown"} 105
dps_history_total{kind="new"} 5
dps_time_to_first_token_seconds_sum{pool="speculative"} 13
dps_time_to_first_token_seconds_count{pool="speculative"} 115
dps_time_per_output_token_seconds_sum{pool="speculative"} 0.12
dps_time_per_output_token_seconds_count{pool="speculative"} 15
dps_in_flight{pool="speculative"} 3
dps_in_flight{pool="greedy"} 12
dps_queued{pool="greedy"} 2
dps_ready_replicas{pool="speculative"} 1
dps_ready_replicas{pool="greedy"} 2
dps_state_degraded 0
"""


def interval(before: str, now: str, seconds: float = 2.0) -> Interval:
    return Interval(Reading.of(before, 10.0), Reading.of(now, 10.0 + seconds))


def test_rates_and_means_cover_the_interval_and_gauges_its_end() -> None:
    assert load_table([interval(BEFORE, NOW)]) == (
        "POOL          READY   IN FLIGHT   QUEUED   TURNS/S   SHARE    TTFT    TPOT\n"
        "speculative       1           3        0       7.5     75%   0.200   0.008\n"
        "greedy            2          12        2       2.5     25%       -       -\n"
        "\n"
        "history: grown 15, new 5\n"
        "session state: ok"
    )


def test_replicas_are_summed_and_their_engines_are_not() -> None:
    degraded = NOW.replace("dps_state_degraded 0", "dps_state_degraded 1")
    assert load_table([interval(BEFORE, NOW), interval(BEFORE, degraded)]) == (
        "POOL          READY   IN FLIGHT   QUEUED   TURNS/S   SHARE    TTFT    TPOT\n"
        "speculative       1           6        0      15.0     75%   0.200   0.008\n"
        "greedy            2          24        4       5.0     25%       -       -\n"
        "\n"
        "history: grown 30, new 10\n"
        "session state: not written to Redis by 1 of 2 gateways"
    )


def test_counters_of_a_restarted_gateway_start_from_zero() -> None:
    series = ("dps_route_decisions_total", "greedy")
    assert interval(NOW, BEFORE).increase(series) == 50


@pytest.mark.parametrize("seconds", ["0", "soon", "nan", "1e9"])
def test_invalid_interval_is_an_error(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--interval", seconds])
    assert exit_.value.code == 2
    assert f"'{seconds}' is not a number of seconds from 0.1 to 3600" in capsys.readouterr().err


def test_gateway_that_cannot_be_read_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    unassigned_port = "http://127.0.0.1:1"
    assert main([unassigned_port, "--once", "--interval", "0.1"]) == 1
    assert capsys.readouterr().err.startswith(
        f"dps top: {unassigned_port}: ClientConnectorError: Cannot connect"
    )
