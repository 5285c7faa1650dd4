"""What engines report: their load, its combination with the gateway's own requests, and their configuration."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from dps_gateway.engine.sglang import SGLang
from dps_gateway.routing.decision import CachedPrompt, CacheUnits, PoolView, PromptTokens
from dps_gateway.upstream.health import MAX_ANSWER_BYTES, watch_configuration, watch_load
from dps_gateway.upstream.replica import NO_LOAD, UNKNOWN, Configuration, Load, Replica
from tests.gateway.engine_pool import SinglePool
from tests.gateway.servers import AskedEngine, serving, until

PROMPT = CachedPrompt(340, held={}, shared=300)
TOKENS = PromptTokens(held=0, fetchable=300, prefill=40)
NO_REPLICA: frozenset[str] = frozenset()
CORE = {"dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 900}
LIMITED = {**CORE, "max_running_requests": 48}
EFFECTIVE = {"max_running_requests": None, "effective_max_running_requests_per_dp": 48}
SIZED = {**CORE, "max_total_num_tokens": 1000, "num_used_tokens": 70}
BUSY = {"timestamp": "2026", "version": "0.5.23", "loads": [CORE]}


@pytest.mark.parametrize(
    ("document", "load"),
    [
        pytest.param(BUSY, Load(3, 2, 900), id="SGLang 0.5.23"),
        pytest.param({"loads": [LIMITED]}, Load(3, 2, 900, limit=48), id="limit of running requests"),
        pytest.param({"loads": [CORE, {**CORE, "dp_rank": 1}]}, Load(6, 4, 1800), id="several ranks"),
        pytest.param({"loads": [LIMITED, CORE]}, Load(6, 4, 1800), id="limit of one rank is unknown"),
        pytest.param({"loads": [SIZED]}, Load(3, 2, 900, free_tokens=930), id="memory"),
        pytest.param({"loads": []}, None, id="no rank"),
        pytest.param({"loads": [{"num_running_reqs": 1}]}, None, id="missing count"),
        pytest.param({"detail": "Not Found"}, None, id="another object"),
    ],
)
def test_load_is_read_from_sglangs_answer(document: Any, load: Load | None) -> None:
    assert SGLang().load_of(document) == load


@pytest.mark.parametrize(
    ("in_flight", "reported", "others"),
    [
        pytest.param(2, Load(2, 0, 0), NO_LOAD, id="only own requests"),
        pytest.param(2, Load(5, 0, 0), Load(3, 0, 0), id="others run"),
        pytest.param(2, Load(5, 2, 700), Load(3, 2, 700), id="some wait"),
        pytest.param(4, Load(3, 2, 700), Load(0, 1, 700), id="mostly own requests"),
        pytest.param(9, Load(1, 0, 0), NO_LOAD, id="own requests that have not arrived"),
        pytest.param(2, Load(1, 1, 5000), NO_LOAD, id="tokens of own requests"),
    ],
)
def test_reported_requests_beyond_the_own_ones_are_those_of_others(
    in_flight: int, reported: Load, others: Load
) -> None:
    replica = Replica("a")
    replica.in_flight = in_flight
    replica.report(reported)
    assert replica.other_load == others


def pool(*urls: str, slots: int = 4) -> SinglePool:
    result = SinglePool(slots=slots)
    result.set_endpoints(urls)
    return result


async def test_view_is_that_of_the_replica_that_would_serve_the_turn() -> None:
    engines = pool("a", "b")
    serving = (await engines.acquire("session", NO_REPLICA, 1.0)).replica
    serving.prefill_tokens = 300
    serving.report(Load(running=4, waiting=1, waiting_tokens=1000, limit=48, free_tokens=800))
    assert engines.view("session", PROMPT) == PoolView(
        ready_replicas=2,
        in_flight=4,
        queued=1,
        queued_prefill_tokens=1000,
        free_tokens=-200,
        running_limit=48,
        replica=serving.id,
        prompt=TOKENS,
    )
    engines.mark_unavailable(serving)
    (other,) = engines.ready
    assert engines.view("session", PROMPT) == PoolView(
        ready_replicas=1,
        in_flight=0,
        queued=0,
        queued_prefill_tokens=0,
        free_tokens=math.inf,
        running_limit=None,
        replica=other.id,
        prompt=TOKENS,
    )


@pytest.fixture
async def engine() -> AsyncIterator[AskedEngine]:
    result = AskedEngine(orjson.dumps(BUSY))
    async with serving(result.handle, "/v1/loads", "/server_info") as result.url:
        yield result


async def test_load_is_requested_with_the_pools_key_while_a_policy_needs_it(engine: AskedEngine) -> None:
    engines = pool(engine.url, "http://127.0.0.1:9")  # nothing listens on the second port
    engines.api_key = "secret"
    wanted = False
    sglang = SGLang()
    task = asyncio.create_task(
        watch_load([engines], sglang.load_path, sglang.load_of, lambda: wanted, interval_seconds=0.01)
    )
    await asyncio.sleep(0.05)
    assert engine.keys == []
    wanted = True
    await engine.asked()
    assert [replica.other_load for replica in engines.replicas.values()] == [Load(3, 2, 900), NO_LOAD]
    assert set(engine.keys) == {"Bearer secret"}
    task.cancel()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param(404, orjson.dumps({"detail": "Not Found"}), id="no such endpoint"),
        pytest.param(500, orjson.dumps(BUSY), id="error"),
        pytest.param(200, b"<html>", id="no JSON"),
        pytest.param(200, b"[]", id="no load"),
        pytest.param(200, orjson.dumps(BUSY) + b" " * MAX_ANSWER_BYTES, id="too long"),
    ],
)
async def test_answer_that_is_not_a_load_counts_as_unknown(
    engine: AskedEngine, status: int, body: bytes
) -> None:
    engines = pool(engine.url)
    sglang = SGLang()
    task = asyncio.create_task(
        watch_load([engines], sglang.load_path, sglang.load_of, lambda: True, interval_seconds=0.01)
    )
    await engine.asked()
    assert engines.replicas[engine.url].other_load == Load(3, 2, 900)
    engine.status, engine.body = status, body
    await engine.asked()
    assert engines.replicas[engine.url].other_load == NO_LOAD
    assert not task.done()
    task.cancel()


@pytest.mark.parametrize(
    ("document", "units"),
    [
        pytest.param({"page_size": 64}, CacheUnits(64, 256), id="page size"),
        pytest.param(
            {"page_size": 1, "hicache_storage_backend_extra_config": '{"prefetch_threshold": 400}'},
            CacheUnits(1, 400),
            id="threshold",
        ),
        pytest.param(
            {"page_size": 16, "hicache_storage_backend_extra_config": "@/etc/cache.json"},
            CacheUnits(16, 256),
            id="settings in a file of the engine",
        ),
        pytest.param({"page_size": None}, CacheUnits(), id="no page size"),
        pytest.param([], None, id="a list"),
    ],
)
def test_units_of_the_cache_are_read_from_sglangs_configuration(
    document: Any, units: CacheUnits | None
) -> None:
    expected = None if units is None else Configuration(units)
    assert SGLang().configuration_of(document) == expected


@pytest.mark.parametrize(
    ("document", "limit"),
    [
        pytest.param({"internal_states": [EFFECTIVE]}, 48, id="effective limit"),
        pytest.param({"internal_states": [EFFECTIVE, EFFECTIVE]}, 96, id="several ranks"),
        pytest.param({"internal_states": [EFFECTIVE, {}]}, None, id="limit of one rank is unknown"),
        pytest.param({"max_running_requests": 64}, 64, id="no state"),
        pytest.param({"max_running_requests": None, "internal_states": None}, None, id="no limit"),
        pytest.param({"max_running_requests": "64", "internal_states": {}}, None, id="not a number"),
    ],
)
def test_limit_of_running_requests_is_read_from_sglangs_configuration(
    document: Any, limit: int | None
) -> None:
    configuration = SGLang().configuration_of(document)
    assert configuration is not None
    assert configuration.max_running == limit


async def test_replica_receives_no_more_requests_than_its_engine_runs() -> None:
    engines = pool("a", "b", "c", slots=4)
    for url, running in {"a": 1, "b": 9}.items():
        engines.record_configuration(engines.replicas[url], Configuration(max_running=running))
    for _ in range(9):
        await engines.acquire(None, NO_REPLICA, 1.0)
    assert {url: replica.in_flight for url, replica in engines.replicas.items()} == {"a": 1, "b": 4, "c": 4}
    assert not engines.has_room()


async def test_replica_whose_limit_is_not_known_yet_receives_as_many_requests_as_the_last_one_ran() -> None:
    engines = pool("a", slots=100)
    (replica,) = engines.replicas.values()
    assert engines.slots(replica) == 100
    engines.record_configuration(replica, Configuration(max_running=48))
    engines.mark_unavailable(replica)
    assert engines.slots(replica) == 48
    engines.set_endpoints([])
    engines.set_endpoints(["b"])
    (new,) = engines.replicas.values()
    assert engines.slots(new) == 48
    engines.record_configuration(new, UNKNOWN)
    assert engines.slots(new) == 100


async def test_configuration_of_a_replica_is_requested_once_and_again_after_it_was_unavailable(
    engine: AskedEngine,
) -> None:
    engines, sglang = pool(engine.url), SGLang()
    replica = engines.replicas[engine.url]

    async def known(expected: Configuration) -> None:
        await until(lambda: replica.configuration == expected, f"it is {expected}")

    engine.status = 503
    task = asyncio.create_task(
        watch_configuration(
            [engines], sglang.configuration_path, sglang.configuration_of, interval_seconds=0.01
        )
    )
    await engine.asked()
    assert replica.configuration is None
    engine.status, engine.body = 200, orjson.dumps({"page_size": 64})
    await known(Configuration(CacheUnits(64)))
    view = engines.view("session", PROMPT)
    assert view is not None
    assert view.prompt == PromptTokens(held=0, fetchable=256, prefill=84, page_rest=44)
    requests = len(engine.keys)
    await asyncio.sleep(0.05)
    assert len(engine.keys) == requests
    engine.status = 404
    engines.mark_unavailable(replica)
    engines.mark_available(replica)
    await known(UNKNOWN)
    task.cancel()
