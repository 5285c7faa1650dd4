"""Attempts, retries and deadlines of a request, against scripted engines."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from dps_gateway.api.public import public_app
from dps_gateway.api.request import TIMEOUT_HEADER
from dps_gateway.config import Limits, Routing, parse_config
from dps_gateway.pool import Pool
from dps_gateway.routing.learning import LearningPolicy
from dps_gateway.routing.policies import AlwaysGreedy
from dps_gateway.runtime import Runtime
from dps_gateway.upstream.replica import ERRORS_TO_EJECT
from dps_gateway.upstream.retries import RETRY_BURST, RETRY_RATIO
from dps_local.assets import bundled_tokenizer
from dps_testkit.tokenizers import shared_tokenizer
from dps_testkit.waiting import wait_until

CHAT = "/v1/chat/completions"
ANSWER = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}


class ScriptedEngine:
    """Answers every request with `status`, after `delay` seconds."""

    def __init__(self, status: int = 200, delay: float = 0.0) -> None:
        self.status = status
        self.delay = delay
        self.requests = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        await asyncio.sleep(self.delay)
        if self.status != 200:
            return web.json_response({"error": {"message": "scripted"}}, status=self.status)
        if (await request.json()).get("stream"):
            return web.Response(text="data: [DONE]\n\n", content_type="text/event-stream")
        return web.json_response(ANSWER)


class Gateway:
    """A gateway between one client and scripted engines."""

    def __init__(self, runtime: Runtime, client: TestClient[Any, Any], engines: list[ScriptedEngine]) -> None:
        self.runtime = runtime
        self._client = client
        self._engines = engines

    @property
    def attempts(self) -> int:
        """Requests that any engine has received."""
        return sum(engine.requests for engine in self._engines)

    async def post(
        self, number: int = 0, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> ClientResponse:
        """One chat request of session `number`."""
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        headers = {"x-session-id": str(number), **(headers or {})}
        response = await self._client.post(CHAT, json=body, headers=headers)
        await response.read()
        return response


Start = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def started(
            speculative: list[ScriptedEngine],
            greedy: list[ScriptedEngine],
            timeouts: str = "{}",
            policy: str = "DeltaPrefill",
            limits: str = "{}",
            common_prefix_cache: bool = False,
        ) -> Gateway:
            urls: list[list[str]] = []
            for pool in (speculative, greedy):
                urls.append([])
                for engine in pool:
                    app = web.Application()
                    app.router.add_post(CHAT, engine.handle)
                    server = await stack.enter_async_context(TestServer(app))
                    urls[-1].append(str(server.make_url("")).rstrip("/"))
            config = parse_config(
                f"model: {{name: m, tokenizer: {bundled_tokenizer()}}}\n"
                f"pools: {{speculative: {{endpoints: {urls[0]}}}, greedy: {{endpoints: {urls[1]}}}}}\n"
                f"routing: {{policy: {policy}, thresholdTokens: null, "
                f"commonPrefixCache: {str(common_prefix_cache).lower()}}}\n"
                f"timeouts: {timeouts}\nlimits: {limits}",
                source="test",
                environment={},
            )
            runtime = Runtime(config, shared_tokenizer(config.model.tokenizer))
            stack.push_async_callback(runtime.close)
            client = await stack.enter_async_context(TestClient(TestServer(public_app(runtime))))
            return Gateway(runtime, client, [*speculative, *greedy])

        yield started


def engines(count: int, status: int = 200, delay: float = 0.0) -> list[ScriptedEngine]:
    return [ScriptedEngine(status, delay) for _ in range(count)]


async def test_rejected_request_is_retried_in_both_pools(start: Start) -> None:
    healthy = ScriptedEngine()
    gateway = await start(engines(3, status=503), [healthy])
    response = await gateway.post()
    assert (response.status, response.headers["x-dps-pool"]) == (200, "greedy")
    assert gateway.attempts == 3


async def test_request_that_all_replicas_reject_is_attempted_three_times(start: Start) -> None:
    gateway = await start(engines(3, status=503), engines(3, status=503))
    assert (await gateway.post()).status == 503
    assert gateway.attempts == 3


async def test_retries_of_rejected_requests_are_limited_to_a_fraction_of_the_load(start: Start) -> None:
    gateway = await start(engines(3, status=503), engines(3, status=503))
    requests = 100
    statuses = {(await gateway.post(number)).status for number in range(requests)}
    assert statuses == {503}
    assert gateway.attempts <= requests + RETRY_BURST + RETRY_RATIO * requests


async def test_unreachable_replicas_are_not_limited_by_the_retry_budget(start: Start) -> None:
    gateway = await start([ScriptedEngine()], [ScriptedEngine()])
    pool = gateway.runtime.pools[Pool.SPECULATIVE]
    for number in range(30):
        pool.set_endpoints([f"http://127.0.0.1:9/{number}"])  # the discard port: connections are refused
        assert (await gateway.post(number)).status == 200


async def test_total_timeout_bounds_all_attempts_of_a_stream(start: Start) -> None:
    timeouts = "{firstByteSeconds: 0.3, totalSeconds: 0.5}"
    gateway = await start(engines(3, delay=30.0), engines(3, delay=30.0), timeouts)
    started = time.monotonic()
    assert (await gateway.post(stream=True)).status == 502
    assert time.monotonic() - started < 10.0
    assert gateway.attempts <= 2


async def test_stream_that_does_not_begin_in_time_is_tried_once_more(start: Start) -> None:
    gateway = await start(engines(3, delay=3.0), engines(3, delay=3.0), "{firstByteSeconds: 0.2}")
    assert (await gateway.post(stream=True)).status == 502
    assert gateway.attempts == 2


async def test_non_streaming_answer_may_take_longer_than_the_first_byte_timeout(start: Start) -> None:
    gateway = await start(engines(2, delay=0.5), engines(2), "{firstByteSeconds: 0.1}")
    response = await gateway.post()
    assert (response.status, response.headers["x-dps-pool"]) == (200, "speculative")
    assert gateway.attempts == 1


async def test_non_streaming_request_is_not_retried_after_the_total_timeout(start: Start) -> None:
    gateway = await start(engines(2, delay=3.0), engines(2, delay=3.0), "{totalSeconds: 0.3}")
    assert (await gateway.post()).status == 502
    assert gateway.attempts == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_time_that_the_client_allows_bounds_all_attempts_and_ejects_no_replica(
    start: Start, stream: bool
) -> None:
    gateway = await start(engines(2, delay=30.0), engines(2, delay=30.0))
    for number in range(2 * ERRORS_TO_EJECT):
        response = await gateway.post(number, headers={TIMEOUT_HEADER: "100"}, stream=stream)
        assert response.status == 504
        assert (await response.json())["error"][
            "message"
        ] == f"no engine answered within 0.1 s ({TIMEOUT_HEADER})"
    assert [len(pool.ready) for pool in gateway.runtime.pools.values()] == [2, 2]


async def test_time_that_the_client_allows_cannot_exceed_the_total_timeout(start: Start) -> None:
    gateway = await start(engines(1, delay=30.0), engines(1, delay=30.0), "{totalSeconds: 0.3}")
    assert (await gateway.post(headers={TIMEOUT_HEADER: "60000"})).status == 502


@pytest.mark.parametrize("sent", ["-1", "1.5", "soon", ""])
async def test_malformed_time_limit_is_refused(start: Start, sent: str) -> None:
    gateway = await start(engines(1), engines(1))
    assert (await gateway.post(headers={TIMEOUT_HEADER: sent})).status == 400
    assert gateway.attempts == 0


async def test_time_limit_of_zero_means_none(start: Start) -> None:
    gateway = await start(engines(1), engines(1))
    assert (await gateway.post(headers={TIMEOUT_HEADER: "0"})).status == 200


async def test_replica_that_keeps_failing_is_ejected(start: Start) -> None:
    failing = ScriptedEngine(status=500)
    gateway = await start([failing, *engines(2)], engines(1))
    statuses = [(await gateway.post(number)).status for number in range(60)]
    assert failing.requests == statuses.count(500) == ERRORS_TO_EJECT
    assert len(gateway.runtime.pools[Pool.SPECULATIVE].ready) == 2


async def test_replica_that_times_out_is_ejected(start: Start) -> None:
    hanging = ScriptedEngine(delay=30.0)
    gateway = await start([hanging, *engines(2)], engines(1), "{firstByteSeconds: 1}")
    statuses = [(await gateway.post(number, stream=True)).status for number in range(60)]
    assert hanging.requests == ERRORS_TO_EJECT
    assert set(statuses) == {200}


async def test_pool_whose_replicas_all_fail_keeps_serving(start: Start) -> None:
    """Errors of every replica are probably caused by the requests."""
    gateway = await start(engines(2, status=500), engines(1))
    for number in range(40):
        await gateway.post(number)
    assert len(gateway.runtime.pools[Pool.SPECULATIVE].ready) == 1


def predicted(response: ClientResponse) -> dict[str, float]:
    """The predictions in a response header, in seconds by pool."""
    pairs = (pair.split("=") for pair in response.headers["x-dps-predicted"].split(","))
    return {pool: float(seconds) for pool, seconds in pairs}


async def test_predicting_policy_reports_what_it_predicts_for_each_pool(start: Start) -> None:
    gateway = await start(engines(1), engines(1), policy="Adaptive")
    response = await gateway.post()
    assert response.headers["x-dps-reason"] == "predicted_faster"
    seconds = predicted(response)
    assert list(seconds) == ["speculative", "greedy"]
    assert min(seconds.values()) > 0
    assert "x-dps-predicted" not in (await (await start(engines(1), engines(1))).post()).headers


async def test_predicting_policy_never_chooses_a_pool_without_a_ready_engine(start: Start) -> None:
    down, up = ScriptedEngine(), ScriptedEngine()
    gateway = await start([down], [up], policy="Adaptive")
    speculative = gateway.runtime.pools[Pool.SPECULATIVE]
    for replica in speculative.replicas.values():
        speculative.mark_unavailable(replica)
    for number in range(20):
        response = await gateway.post(number)
        assert (response.headers["x-dps-pool"], response.headers["x-dps-reason"]) == (
            "greedy",
            "predicted_faster",
        )
        assert list(predicted(response)) == ["greedy"]
    assert (down.requests, up.requests) == (0, 20)


async def test_turn_that_another_pool_served_after_a_failure_is_not_learned_from(start: Start) -> None:
    """The failed attempt is part of the turn's duration."""
    learned = {}
    for failing, healthy in ((0, 1), (1, 0)):  # one of them is the pool that the policy chooses
        pools = {failing: engines(1, status=503), healthy: engines(1)}
        gateway = await start(pools[0], pools[1], policy="Adaptive")
        policy = gateway.runtime.policy
        assert isinstance(policy, LearningPolicy)
        before = policy.export()
        response = await gateway.post()
        assert response.status == 200
        learned[response.headers["x-dps-reason"]] = policy.export() != before
    assert learned == {"failover": False, "predicted_faster": True}


async def test_turn_of_a_predicting_policy_goes_to_the_other_pool_if_the_chosen_one_is_full(
    start: Start,
) -> None:
    gateway = await start(
        engines(1, delay=1.0), engines(1, delay=1.0), policy="Adaptive", limits="{maxInFlightPerReplica: 1}"
    )
    answers = await asyncio.gather(*(gateway.post(number) for number in range(2)))
    assert {answer.headers["x-dps-pool"] for answer in answers} == {"speculative", "greedy"}
    assert {answer.headers["x-dps-reason"] for answer in answers} <= {"predicted_faster", "fixed", "overload"}


async def test_completed_turns_are_learned_from_and_their_prediction_errors_counted(start: Start) -> None:
    gateway = await start(engines(1), engines(1), policy="Adaptive")
    policy, metrics = gateway.runtime.policy, gateway.runtime.metrics
    assert isinstance(policy, LearningPolicy)
    before = policy.export()
    await gateway.post(stream=False)
    assert policy.export() != before
    counts = [
        metrics.registry.get_sample_value("dps_prediction_error_seconds_count", {"pool": pool}) or 0
        for pool in ("speculative", "greedy")
    ]
    assert sum(counts) == 1


async def test_reloaded_configuration_keeps_what_the_policy_has_learned(start: Start) -> None:
    gateway = await start(engines(1), engines(1), policy="Adaptive")
    runtime = gateway.runtime
    policy = runtime.policy
    runtime.apply(runtime.config.model_copy(update={"limits": Limits.model_validate({"maxQueued": 1})}))
    assert runtime.policy is policy
    runtime.apply(
        runtime.config.model_copy(update={"routing": Routing.model_validate({"policy": "AlwaysGreedy"})})
    )
    assert runtime.policy == AlwaysGreedy()


async def test_tokens_that_a_pool_fetches_are_not_queued_for_prefill(start: Start) -> None:
    """A session whose first turn the greedy pool has answered is repeated in the speculative pool."""
    gateway = await start(engines(1, delay=1.0), engines(1), policy="AlwaysGreedy", common_prefix_cache=True)
    messages = [{"role": "user", "content": "hello " * 1000}]
    await gateway.post(stream=True, messages=messages)
    routing = gateway.runtime.config.routing.model_copy(update={"policy": "AlwaysSpeculative"})
    gateway.runtime.apply(gateway.runtime.config.model_copy(update={"routing": routing}))
    (replica,) = gateway.runtime.pools[Pool.SPECULATIVE].replicas.values()
    messages += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "on"}]
    waiting = asyncio.create_task(gateway.post(stream=True, messages=messages))

    async def sent() -> bool:
        return replica.in_flight > 0

    await wait_until(sent, "the request is in flight")
    queued = replica.prefill_tokens
    response = await waiting
    assert queued == int(response.headers["x-dps-delta-tokens"]) < 256


async def test_uncached_tokens_are_queued_for_prefill_until_the_engine_begins_to_stream(start: Start) -> None:
    gateway = await start(engines(1, delay=1.0), engines(1), policy="AlwaysSpeculative")
    (replica,) = gateway.runtime.pools[Pool.SPECULATIVE].replicas.values()
    waiting = asyncio.create_task(gateway.post(stream=True))

    async def sent() -> bool:
        return replica.in_flight > 0

    await wait_until(sent, "the request is in flight")
    queued = replica.prefill_tokens
    response = await waiting
    assert queued == int(response.headers["x-dps-prompt-tokens"])
    assert replica.prefill_tokens == 0


async def asleep(start: Start, policy: str = "DeltaPrefill") -> tuple[Gateway, str]:
    """A gateway whose pools have no replica, and the URL of an engine that could be one."""
    gateway = await start(engines(1), engines(1), "{wakeSeconds: 60, healthIntervalSeconds: 600}", policy)
    (url,) = gateway.runtime.pools[Pool.SPECULATIVE].replicas
    for pool in gateway.runtime.pools.values():
        pool.set_endpoints([])
    assert gateway.runtime.ready
    return gateway, url


async def queued(gateway: Gateway) -> None:
    """Return when one request waits."""

    async def waits() -> bool:
        return len(gateway.runtime.admission) == 1

    await wait_until(waits, "the request waits")


@pytest.mark.parametrize("policy", ["DeltaPrefill", "AlwaysGreedy", "Adaptive"])
@pytest.mark.parametrize("stopped", [[], ["http://127.0.0.1:1"]], ids=["no replica", "a stopped replica"])
async def test_request_waits_for_an_engine_that_starts(start: Start, policy: str, stopped: list[str]) -> None:
    gateway, url = await asleep(start, policy)
    speculative = gateway.runtime.pools[Pool.SPECULATIVE]
    speculative.set_endpoints(stopped)
    waiting = asyncio.create_task(gateway.post())
    await queued(gateway)
    speculative.set_endpoints([url])
    assert (await waiting).status == 200


async def test_request_that_every_engine_has_rejected_does_not_wait(start: Start) -> None:
    gateway = await start(engines(1, status=503), engines(1, status=503), "{wakeSeconds: 60}")
    assert (await gateway.post()).status == 503
    assert gateway.attempts == 2


async def test_requests_without_a_ready_engine_in_their_pool_are_counted(start: Start) -> None:
    gateway, url = await asleep(start)
    gateway.runtime.pools[Pool.GREEDY].set_endpoints([url])
    assert (await gateway.post()).headers["x-dps-pool"] == "greedy"
    assert 'dps_pool_unavailable_total{pool="speculative"} 1.0' in gateway.runtime.metrics.render().decode()


async def test_suspended_router_refuses_waiting_and_new_requests(start: Start) -> None:
    gateway, _ = await asleep(start)
    waiting = asyncio.create_task(gateway.post())
    await queued(gateway)
    config = gateway.runtime.config
    routing = config.routing.model_copy(update={"suspended": True})
    gateway.runtime.apply(config.model_copy(update={"routing": routing}))
    for response in (await waiting, await gateway.post()):
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "suspended"
    assert gateway.attempts == 0
    assert gateway.runtime.ready
