"""Whether the storage of a common prefix cache serves what it should contain, from the gateways' metrics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest

from dps_engines.registry import RUNTIMES
from dps_operator.cache_health import ENOUGH_TOKENS, HALF_LIFE_SECONDS, CacheWatch, Counters, Tally, counters
from dps_operator.diagnose import CacheHealth
from dps_operator.errors import GatewaysUnreachableError
from dps_operator.metrics import Found, MetricsReader
from dps_operator.objects import Manifest
from dps_operator.observe import Observations
from dps_testkit.operator.routers import PREFIX_CACHE
from tests.operator.objects import READY, pod

KEY = ("serving", "qwen")
NOTHING = CacheHealth()
SERVED = CacheHealth(judged={"greedy"})
UNSERVED = CacheHealth(judged={"greedy"}, unserved={"greedy"})


def metrics(fetchable: float, fetched: float) -> str:
    """The metrics of a gateway whose greedy pool could fetch and has fetched these tokens."""
    return f"""\
# TYPE dps_fetchable_tokens counter
dps_fetchable_tokens_total{{pool="greedy"}} {fetchable}
# TYPE dps_prompt_tokens_by_source counter
dps_prompt_tokens_by_source_total{{pool="greedy",source="held"}} 7.0
dps_prompt_tokens_by_source_total{{pool="greedy",source="fetched"}} {fetched}
"""


def greedy(fetchable: float, fetched: float) -> Counters:
    return {"speculative": {}, "greedy": {"fetchable": fetchable, "fetched": fetched}}


def test_tokens_are_read_from_the_metrics_of_a_gateway() -> None:
    assert counters(metrics(300, 200)) == greedy(300.0, 200.0)
    assert counters("") == {"speculative": {}, "greedy": {}}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        pytest.param([(9e9, 0)], NOTHING, id="what was counted before the operator started"),
        pytest.param([(0, 0), (9_999, 0)], NOTHING, id="too few tokens"),
        pytest.param([(0, 0), (10_000, 4_999)], UNSERVED, id="less than half"),
        pytest.param([(0, 0), (6_000, 0), (12_000, 0)], UNSERVED, id="enough tokens in two intervals"),
        pytest.param([(50_000, 50_000), (10_000, 0)], UNSERVED, id="a gateway that has restarted"),
        pytest.param([(0, 0), (10_000, 0), (90_000, 80_000)], SERVED, id="a storage that serves again"),
    ],
)
def test_storage_is_judged_by_the_share_of_fetchable_tokens_that_were_fetched(
    samples: Sequence[tuple[float, float]], expected: CacheHealth
) -> None:
    tally = Tally()
    for fetchable, fetched in samples:
        tally.add_gateways({"10.0.0.1": greedy(fetchable, fetched)}, now=0.0)
    assert tally.health == expected


def test_tokens_of_several_gateways_count_and_one_that_joins_begins_with_its_present_counters() -> None:
    tally = Tally()
    tally.add_gateways({"a": greedy(0, 0)}, now=0.0)
    tally.add_gateways({"a": greedy(6_000, 0), "b": greedy(90_000, 90_000)}, now=0.0)
    assert tally.health == NOTHING
    tally.add_gateways({"a": greedy(6_000, 0), "b": greedy(96_000, 90_000)}, now=0.0)
    assert tally.health == UNSERVED


def test_older_tokens_count_less() -> None:
    tally = Tally()
    tally.add_gateways({"a": greedy(0, 0)}, now=0.0)
    tally.add_gateways({"a": greedy(ENOUGH_TOKENS, 0)}, now=0.0)
    assert tally.health == UNSERVED
    newer = greedy(2 * ENOUGH_TOKENS, 0.7 * ENOUGH_TOKENS)  # 35 % of all tokens, and 56 % with weights
    tally.add_gateways({"a": newer}, now=2 * HALF_LIFE_SECONDS)
    assert tally.health == SERVED


class Metrics(MetricsReader):
    """Has the metrics of one gateway, or fails with `problem`, and of engines by address."""

    def __init__(self) -> None:
        self.text, self.problem = metrics(0, 0), ""
        self.by_address: dict[str, str] = {}
        """Engines that are missing do not answer."""
        self.asked: list[str] = []

    async def gateways(self, addresses: list[str], parse: Callable[[str], Found]) -> dict[str, Found]:
        self.asked = addresses
        if self.problem:
            raise GatewaysUnreachableError(self.problem)
        return {address: parse(self.text) for address in addresses}

    async def engines(
        self, addresses: Sequence[str], port: int, parse: Callable[[str], Found]
    ) -> dict[str, Found]:
        assert port == RUNTIMES["SGLang"].port
        texts = {address: self.by_address[address] for address in addresses if address in self.by_address}
        return {address: parse(text) for address, text in texts.items()}


def body(spec: Mapping[str, object]) -> Manifest:
    return {"metadata": {"name": KEY[1], "namespace": KEY[0], "uid": "u"}, "spec": dict(spec)}


async def test_routers_are_reconciled_when_the_result_changes() -> None:
    seen, pods = Observations(), Metrics()
    seen.update_router(body(PREFIX_CACHE))
    seen.update_pod(pod("gateway-1", "gateway", podIP="10.0.0.1", conditions=[READY]))
    watch = CacheWatch(seen, pods)
    assert await watch.once(0.0) == []
    assert pods.asked == ["10.0.0.1"]
    assert await watch.once(1.0) == []
    pods.text = metrics(20_000, 0)
    assert await watch.once(2.0) == [KEY]
    assert seen.cache_health[KEY] == UNSERVED
    pods.problem = "no gateway is ready"
    assert await watch.once(3.0) == [KEY]
    assert seen.cache_health[KEY] == replace(UNSERVED, unreachable="no gateway is ready")
    seen.routers[KEY]["spec"] = {**PREFIX_CACHE, "prefixCache": {"mode": "Separate"}}
    assert await watch.once(4.0) == []
    assert KEY not in seen.cache_health


@pytest.mark.parametrize("spec", [{}, {"prefixCache": {"mode": "Common"}}], ids=["none", "an invalid spec"])
async def test_routers_without_a_common_prefix_cache_are_not_observed(spec: dict[str, object]) -> None:
    seen, pods = Observations(), Metrics()
    seen.update_router(body(spec))
    assert await CacheWatch(seen, pods).once(0.0) == []
    assert pods.asked == []


async def test_engines_are_observed_even_if_no_gateway_answers() -> None:
    seen, pods = Observations(), Metrics()
    pods.problem = "no gateway is ready"
    seen.update_router(body(PREFIX_CACHE))
    seen.update_pod(pod("greedy-1", "greedy", podIP="10.0.0.2"))
    seen.update_pod(pod("greedy-2", "greedy", podIP="10.0.0.3"))
    seen.update_pod(pod("redis-0", "redis", podIP="10.0.0.4"))
    sharing = 'dps_prefix_cache_sharing{{pages="{}",problem="{}"}} 1.0'
    pods.by_address = {"10.0.0.3": sharing.format("", "LoRA"), "10.0.0.4": ""}
    watch = CacheWatch(seen, pods)
    await watch.once(0.0)
    assert seen.cache_health[KEY].unshared == {"greedy": "LoRA"}
