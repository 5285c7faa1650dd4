"""Statistics and tables of the benchmark."""

from dps_lab.bench import metrics, table
from dps_lab.bench.peers import BARE, VLLM
from dps_lab.bench.summary import Round, Spread, Summary, summarise
from dps_lab.bench.traffic import Content, TrafficPattern


def test_ratios_are_per_round_and_cpu_is_over_all_rounds() -> None:
    rounds = {
        VLLM: [
            Round(rate=1000, latency=0.010, cpu_seconds=0.125, requests=1024, lost=0.0),
            Round(rate=100, latency=0.030, cpu_seconds=0.375, requests=1024, lost=0.5),
            Round(rate=900, latency=0.011, cpu_seconds=0.25, requests=1024, lost=0.1),
        ],
        BARE: [
            Round(rate=500, latency=0.020, cpu_seconds=1.0, requests=2048, lost=0.0),
            Round(rate=60, latency=0.050, cpu_seconds=0.0, requests=0, lost=0.2),
            Round(rate=450, latency=0.021, cpu_seconds=0.5, requests=1024, lost=0.4),
        ],
    }
    assert summarise(rounds) == {
        VLLM: Summary(Spread(900, 100, 1000), Spread(1, 1, 1), 0.011, cpu=2**-12, cpu_ratio=1.0, lost=0.1),
        BARE: Summary(
            Spread(450, 60, 500), Spread(0.5, 0.5, 0.6), 0.021, cpu=2**-11, cpu_ratio=0.5, lost=0.2
        ),
    }


def test_throughput_table_has_one_row_per_router() -> None:
    summaries = {
        "vllm-router": Summary(Spread(5300, 5000, 5600.4), Spread(1, 1, 1), 0.0021, 60e-6, 1.0, 0.0),
        "dps gateway": Summary(Spread(1590, 1400, 1700), Spread(0.3, 0.28, 0.31), 0.01, 240e-6, 0.25, 0.126),
    }
    assert (
        table.throughput(TrafficPattern(True, Content(4096, "growing")), summaries)
        == """\
### 32-chunk stream, 4 KB, growing sessions

| router      | req/s |     min–max | x vllm |   min–max | CPU µs/req | x vllm per CPU s | p50 ms | CPU lost |
| :---------- | ----: | ----------: | -----: | --------: | ---------: | ---------------: | -----: | -------: |
| vllm-router | 5,300 | 5,000–5,600 |   1.00 | 1.00–1.00 |         60 |             1.00 |   2.10 |      0 % |
| dps gateway | 1,590 | 1,400–1,700 |   0.30 | 0.28–0.31 |        240 |             0.25 |  10.00 |     13 % |"""
    )


def test_table_of_ratios_has_one_column_per_router_that_the_gateway_is_compared_with() -> None:
    ratios = {
        TrafficPattern(False, Content(4096, "distinct")): [Spread(0.29, 0.28, 0.31), Spread(0.1, 0.1, 0.11)]
    }
    assert (
        table.ratios(ratios, ["vllm-router cache_aware", "vllm-router round_robin"])
        == """\
| requests per second of the gateway, relative to | vllm-router cache_aware | vllm-router round_robin |
| :---------------------------------------------- | ----------------------: | ----------------------: |
| non-streaming, 4 KB, distinct sessions          |        0.29 (0.28–0.31) |        0.10 (0.10–0.11) |"""
    )


def test_added_time_table_ends_with_the_overhead_reported_by_the_gateway() -> None:
    content = Content(32768, "distinct")
    added = {content: {"dps gateway": Spread(0.0009, 0.0008, 0.001)}}
    assert (
        table.added_time(added, {content: 0.0007})
        == """\
| time added before the engine, µs | 32 KB, distinct sessions |
| :------------------------------- | -----------------------: |
| dps gateway                      |           900 (800–1000) |
| dps_gateway_overhead_seconds     |                      700 |"""
    )


def test_tracing_cost_table_has_one_row_per_setting() -> None:
    summaries = {
        "off": Summary(Spread(2500, 2400, 2600), Spread(1, 1, 1), 0.006, 400e-6, 1.0, 0.0),
        "all": Summary(Spread(1500, 1400, 1600), Spread(0.6, 0.58, 0.62), 0.01, 700e-6, 0.57, 0.0),
    }
    typical = {"off": Spread(0.0008, 0.0007, 0.0009), "all": Spread(0.001, 0.0009, 0.0011)}
    slow = {"off": Spread(0.002, 0.0019, 0.003), "all": Spread(0.005, 0.004, 0.0061)}
    assert (
        table.cost_of_tracing(TrafficPattern(False, Content(4096, "distinct")), summaries, typical, slow)
        == """\
### non-streaming, 4 KB, distinct sessions

| tracing | req/s | x off |   min–max | CPU µs/req |   p50 µs, 1 conn. |     p99 µs, 1 conn. |
| :------ | ----: | ----: | --------: | ---------: | ----------------: | ------------------: |
| off     | 2,500 |  1.00 | 1.00–1.00 |        400 |     800 (700–900) | 2,000 (1,900–3,000) |
| all     | 1,500 |  0.60 | 0.58–0.62 |        700 | 1,000 (900–1,100) | 5,000 (4,000–6,100) |"""
    )


ROWS = {
    "dps gateway": table.Row(rate=312.4, latency=(0.0642, 0.0911), first_byte=(1.25, 2.5), cpu=0.0031),
    "other": None,
}


def test_tables_of_long_requests_state_which_routers_failed() -> None:
    assert (
        table.latencies("220 KB", ROWS)
        == """\
### 220 KB

| router      |  req/s | p50 ms | p99 ms | CPU µs/req |
| :---------- | -----: | -----: | -----: | ---------: |
| dps gateway |    312 |     64 |     91 |      3,100 |
| other       | failed |        |        |            |"""
    )
    assert (
        table.first_bytes("streams", ROWS)
        == """\
### streams

| router      | first byte p50 ms | first byte p99 ms | last byte p99 s | CPU ms/stream |
| :---------- | ----------------: | ----------------: | --------------: | ------------: |
| dps gateway |             1,250 |             2,500 |             0.1 |          3.10 |
| other       |            failed |                   |                 |               |"""
    )


def test_table_of_workers_has_the_ratio_of_cpu_times() -> None:
    assert (
        table.workers({TrafficPattern(False, Content(4096, "growing")): (400e-6, 440e-6)})
        == """\
### Two workers

| workers of the gateway on one core    | CPU µs/req, one | two | two x one, if on two cores |
| :------------------------------------ | --------------: | --: | -------------------------: |
| non-streaming, 4 KB, growing sessions |             400 | 440 |                       1.82 |"""
    )


BEFORE = """\
# TYPE dps_history_total counter
dps_history_total{kind="new"} 5.0
# TYPE dps_gateway_overhead_seconds histogram
dps_gateway_overhead_seconds_bucket{le="+Inf"} 10.0
dps_gateway_overhead_seconds_sum 1.0
dps_gateway_overhead_seconds_count 10.0
"""
AFTER = """\
# TYPE dps_history_total counter
dps_history_total{kind="new"} 5.0
dps_history_total{kind="grown"} 7.0
# TYPE dps_gateway_overhead_seconds histogram
dps_gateway_overhead_seconds_bucket{le="+Inf"} 14.0
dps_gateway_overhead_seconds_sum 1.5
dps_gateway_overhead_seconds_count 14.0
"""


def test_mean_and_counter_increase_are_computed_between_two_scrapes() -> None:
    before, after = metrics.parse(BEFORE), metrics.parse(AFTER)
    assert metrics.mean_between(before, after, "dps_gateway_overhead_seconds") == 0.125
    assert metrics.rise(before, after, "dps_history_total") == {"kind=grown": 7.0}
    assert table.counts("dps_history_total", metrics.rise({}, after, "dps_history_total")) == (
        "dps_history_total: kind=grown 7, kind=new 5"
    )
    assert table.counts("dps_nothing_total", {}) == "dps_nothing_total: none"
