"""What the operator concludes from the engines' metrics about a common prefix cache."""

from collections.abc import Mapping, Sequence

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_engines.pools import PoolName
from dps_operator.cache_health import (
    EngineSample,
    Tally,
    engine_sample,
)
from dps_operator.diagnose import CacheHealth
from dps_operator.metrics import MetricsReader

METRICS = """\
# TYPE dps_prefix_cache_sharing gauge
dps_prefix_cache_sharing{pages="a",problem=""} 1.0
dps_prefix_cache_sharing{pages="",problem="earlier"} 0.0
# TYPE dps_prefix_cache_pages counter
dps_prefix_cache_pages_total{outcome="stored"} 7.0
# TYPE sglang:prefetch_bandwidth histogram
sglang:prefetch_bandwidth_bucket{le="+Inf",tp_rank="0"} 2.0
sglang:prefetch_bandwidth_count{tp_rank="0"} 2.0
sglang:prefetch_bandwidth_sum{tp_rank="0"} 3.0
sglang:prefetch_bandwidth_count{tp_rank="1"} 1.0
sglang:prefetch_bandwidth_sum{tp_rank="1"} 1.0
# TYPE sglang:realtime_tokens counter
sglang:realtime_tokens_total{mode="prefill_compute"} 900.0
sglang:realtime_tokens_total{mode="decode"} 5.0
# TYPE sglang:per_stage_req_latency_seconds histogram
sglang:per_stage_req_latency_seconds_sum{stage="prefill_forward"} 0.5
sglang:per_stage_req_latency_seconds_sum{stage="decode_loop"} 9.0
# TYPE sglang:kv_cache_memory_usage_gb gauge
sglang:kv_cache_memory_usage_gb 10.0
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens 100000.0
"""


def test_what_concerns_the_common_prefix_cache_is_read_from_an_engines_metrics() -> None:
    assert engine_sample(METRICS) == EngineSample(
        frozenset({("a", "")}),
        {"stored": 7.0, "bandwidth": 4.0, "fetches": 3.0, "prefilled": 900.0, "prefill_seconds": 0.5},
        kv_gigabytes_per_token=10 * 1.073741824 / 100_000,
    )
    assert engine_sample("") == EngineSample()


def reports(*steps: Mapping[str, float], gigabytes: float = 0.0) -> CacheHealth:
    """The reports after a greedy engine has had these counters, one after the other."""
    tally = Tally()
    for counters in steps:
        sample = EngineSample(counters=counters, kv_gigabytes_per_token=gigabytes)
        tally.add_engines({"speculative": {}, "greedy": {"10.0.0.1": sample}}, 0.0)
    return tally.health


def pages(**outcomes: float) -> Mapping[str, float]:
    return outcomes


FULL = CacheHealth(full={"greedy"})
FAILING = CacheHealth(failing={"greedy"})
NOTHING = CacheHealth()
BOTH: set[PoolName] = {"speculative", "greedy"}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        pytest.param([pages(), pages(full=99)], NOTHING, id="too few pages"),
        pytest.param([pages(), pages(stored=50, full=50)], FULL, id="half of the pages have no space"),
        pytest.param([pages(), pages(full=100), pages(full=100, stored=900)], NOTHING, id="space again"),
        pytest.param([pages(), pages(full=100), pages(full=100, stored=1)], FULL, id="no new evidence"),
        pytest.param([pages(), pages(full=100, present=900)], FULL, id="what others stored is no evidence"),
        pytest.param([pages(), pages(write_error=100)], FAILING, id="pages cannot be written"),
        pytest.param([pages(), pages(read_error=60, read=40)], FAILING, id="pages cannot be read"),
        pytest.param(
            [pages(), pages(write_error=100), pages(write_error=100, read=500)], FAILING, id="only reads work"
        ),
    ],
)
def test_storage_is_judged_by_the_outcomes_of_pages(
    steps: Sequence[Mapping[str, float]], expected: CacheHealth
) -> None:
    assert reports(*steps) == expected


def transfers(bandwidth: float, fetches: int = 20) -> Mapping[str, float]:
    """The counters after fetches with this mean bandwidth in GB/s; the engine prefills 10,000 tokens/s."""
    return {
        "bandwidth": bandwidth * fetches,
        "fetches": fetches,
        "prefilled": 1000.0,
        "prefill_seconds": 0.1,
    }


KV_GIGABYTES = 56 * 1024 / 1e9
"""Of a token of Qwen2.5-7B, so the break-even is 0.57 GB/s."""


@pytest.mark.parametrize(
    ("bandwidth", "fetches", "expected"),
    [
        (0.6, 20, {}),
        (0.5, 20, {"greedy": "0.5 GB/s instead of 0.57"}),
        (0.5, 19, {}),
    ],
    ids=["faster than prefill", "slower than prefill", "too few fetches"],
)
def test_storage_is_slow_if_the_engine_computes_tokens_faster_than_it_fetches_them(
    bandwidth: float, fetches: int, expected: dict[PoolName, str]
) -> None:
    found = reports({}, transfers(bandwidth, fetches), gigabytes=KV_GIGABYTES)
    assert found == CacheHealth(slow=expected)


OURS, OTHERS = EngineSample(frozenset({("a", "")})), EngineSample(frozenset({("b", "")}))
TWO_RANKS = EngineSample(frozenset({("a", ""), ("b", "")}))
LORA = EngineSample(frozenset({("", "LoRA adapters are enabled")}))


@pytest.mark.parametrize(
    ("speculative", "greedy", "expected"),
    [
        pytest.param(EngineSample(), EngineSample(), NOTHING, id="without the metric"),
        pytest.param(OURS, OURS, CacheHealth(reporting=BOTH), id="same pages"),
        pytest.param(TWO_RANKS, TWO_RANKS, CacheHealth(reporting=BOTH), id="same pages of two ranks"),
        pytest.param(
            OURS,
            EngineSample(),
            CacheHealth(reporting={"speculative"}),
            id="only one has reported",
        ),
        pytest.param(OURS, OTHERS, CacheHealth(reporting=BOTH, different=True), id="different pages"),
        pytest.param(
            OURS,
            LORA,
            CacheHealth(reporting=BOTH, unshared={"greedy": "LoRA adapters are enabled"}),
            id="one shares none",
        ),
    ],
)
def test_engines_report_whether_they_share_pages(
    speculative: EngineSample, greedy: EngineSample, expected: CacheHealth
) -> None:
    tally = Tally()
    tally.add_engines({"speculative": {"a": speculative}, "greedy": {"b": greedy}}, 0.0)
    assert tally.health == expected


def test_reports_of_a_pool_end_when_its_engines_answer_without_them() -> None:
    tally = Tally()
    tally.add_engines({"speculative": {"a": OURS}, "greedy": {"b": OURS}}, 0.0)
    tally.add_engines({"speculative": {"a": OURS}, "greedy": {"b": EngineSample()}}, 1.0)
    assert tally.health == CacheHealth(reporting={"speculative"})


async def test_engines_that_do_not_answer_or_whose_metrics_cannot_be_read_are_left_out() -> None:
    status, text = 200, METRICS

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        assert server.port is not None
        reader = MetricsReader(session)
        assert await reader.engines(["127.0.0.1", "::1"], server.port, str) == {"127.0.0.1": METRICS}
        text = 'dps_prefix_cache_pages_total{x="y"} 1\n'
        assert await reader.engines(["127.0.0.1"], server.port, engine_sample) == {}
        status = 503
        assert await reader.engines(["127.0.0.1"], server.port, str) == {}
        assert await reader.engines([], server.port, str) == {}
