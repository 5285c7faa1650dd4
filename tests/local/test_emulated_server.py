"""The emulated server's HTTP API: streams, usage, aborts, errors, faults and server information."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import ClientResponse, ServerDisconnectedError
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.test_utils import TestClient, TestServer

from dps_local.assets import bundled_tokenizer
from dps_local.emulated_sglang.clock import Clock
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.server import ENGINE, create_app
from dps_local.emulated_sglang.settings import EngineSettings
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, TimeModel
from dps_testkit.clock import VirtualClock

SETTINGS = EngineSettings(str(bundled_tokenizer()), served_model_name="m")
SLOW = replace(SETTINGS, time_model=TimeModel(decode_base_seconds=30.0))
CHAT = "/v1/chat/completions"
HELLO = {
    "model": "m",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 4,
    "ignore_eos": True,
}

Start = Callable[..., Awaitable[TestClient[Any, Any]]]


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts.load(SETTINGS.tokenizer_path)


@pytest.fixture
async def start(prompts: Prompts) -> AsyncIterator[Start]:
    """Starts engines in virtual time, or in real time if `clock` is None."""
    async with AsyncExitStack() as stack:

        async def start(settings: EngineSettings = SETTINGS, **changes: Any) -> TestClient[Any, Any]:
            clock: Clock | None = None if changes.pop("real_time", False) else VirtualClock()
            app = create_app(replace(settings, **changes), prompts, clock)
            return await stack.enter_async_context(TestClient(TestServer(app)))

        yield start


async def events(answer: ClientResponse) -> list[Any]:
    """The events of a stream. Also checks the framing."""
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *frames, rest = (await answer.text()).split("\n\n")
    assert rest == ""
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def engine_of(client: TestClient[Any, Any]) -> Any:
    app = client.app
    assert app is not None
    return app[ENGINE]


async def until_running(client: TestClient[Any, Any]) -> None:
    while engine_of(client).scheduler.running == 0:  # noqa: ASYNC110 - in-process state without an event
        await asyncio.sleep(0)


async def test_chat_stream_has_role_then_text_then_finish_reason(start: Start) -> None:
    client = await start()
    got = await events(await client.post(CHAT, json=HELLO | {"stream": True}))
    whole = await (await client.post(CHAT, json=HELLO)).json()

    deltas = [chunk["choices"][0]["delta"] for chunk in got]
    assert deltas[0] == {"reasoning_content": None, "role": "assistant", "content": ""}
    assert deltas[-1] == {"reasoning_content": None}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None] * 5 + ["length"]
    assert all("usage" not in chunk for chunk in got)
    assert len({chunk["id"] for chunk in got}) == 1


async def test_stream_ends_with_usage_on_request(start: Start) -> None:
    client = await start()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    last = (await events(await client.post(CHAT, json=HELLO | options)))[-1]

    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": last["usage"]["prompt_tokens"],
        "total_tokens": last["usage"]["prompt_tokens"] + 4,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 0},
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


async def test_next_turn_finds_the_whole_answer_cached(start: Start) -> None:
    client = await start()
    first = await (await client.post(CHAT, json=HELLO)).json()
    answer = first["choices"][0]["message"]
    more = [*HELLO["messages"], answer, {"role": "user", "content": "more"}]  # type: ignore[misc]
    second = await (await client.post(CHAT, json=HELLO | {"messages": more})).json()

    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["total_tokens"] - 1


async def test_speculation_changes_latency_but_not_the_answer(start: Start) -> None:
    greedy, speculative = await start(), await start(time_model=TimeModel(speculation=STANDALONE))
    body = {"text": "once", "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
    plain = await (await greedy.post("/generate", json=body)).json()
    drafted = await (await speculative.post("/generate", json=body)).json()

    assert drafted["text"] == plain["text"]
    assert drafted["meta_info"]["e2e_latency"] < plain["meta_info"]["e2e_latency"]
    assert drafted["meta_info"]["spec_accept_length"] > 2


STANDALONE = SPECULATION_DEFAULTS["STANDALONE"]


async def test_generate_streams_cumulative_text(start: Start) -> None:
    client = await start()
    body = {"text": "once", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "stream": True}
    got = await events(await client.post("/generate", json=body))

    assert [event["meta_info"]["completion_tokens"] for event in got] == [1, 2, 3]
    assert all(b["text"].startswith(a["text"]) for a, b in pairwise(got))
    assert [event["meta_info"]["finish_reason"] for event in got] == [
        None,
        None,
        {"type": "length", "length": 3},
    ]


async def test_batch_is_answered_in_order_and_choices_differ(start: Start) -> None:
    client = await start()
    body = {"text": ["a b", "c d e"], "sampling_params": {"max_new_tokens": 5, "n": 2, "ignore_eos": True}}
    answers = await (await client.post("/generate", json=body)).json()

    assert [each["meta_info"]["prompt_tokens"] for each in answers] == sorted(
        each["meta_info"]["prompt_tokens"] for each in answers
    )
    assert len({each["text"] for each in answers}) == 4


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_client_disconnect_aborts_the_request(stream: bool, start: Start) -> None:
    client = await start(SLOW, real_time=True)
    asking = asyncio.create_task(client.post(CHAT, json=HELLO | {"stream": stream}))
    await until_running(client)
    asking.cancel()
    await asyncio.wait([asking])

    while engine_of(client).scheduler.running:  # noqa: ASYNC110 - in-process state without an event
        await asyncio.sleep(0)
    assert "sglang:num_aborted_requests_total{" in await (await client.get("/metrics")).text()
    loads = (await (await client.get("/v1/loads")).json())["loads"][0]
    assert (loads["num_running_reqs"], loads["num_waiting_reqs"], loads["num_used_tokens"]) == (0, 0, 0)


async def test_load_counts_only_uncached_tokens_of_waiting_requests(start: Start) -> None:
    client = await start(SLOW, real_time=True, max_running_requests=1)
    scheduler = engine_of(client).scheduler
    scheduler.insert(tuple(range(8)))
    running = asyncio.create_task(client.post("/generate", json=GENERATE | {"input_ids": [99]}))
    await until_running(client)
    waiting = asyncio.create_task(client.post("/generate", json=GENERATE | {"input_ids": list(range(10))}))
    while not scheduler.waiting:  # noqa: ASYNC110 - in-process state without an event
        await asyncio.sleep(0)

    load = (await (await client.get("/v1/loads")).json())["loads"][0]
    await client.post("/abort_request", json={"abort_all": True})
    await asyncio.gather(running, waiting)

    assert (load["num_waiting_reqs"], load["num_waiting_uncached_tokens"]) == (1, 2)
    assert load["num_total_tokens"] == load["num_used_tokens"] + 10


async def test_aborted_request_has_finish_reason_abort(start: Start) -> None:
    client = await start(SLOW, real_time=True)
    asking = asyncio.create_task(client.post(CHAT, json=HELLO | {"rid": "mine-1"}))
    await until_running(client)
    await client.post("/abort_request", json={"rid": "mine"})

    assert (await (await asking).json())["choices"][0]["finish_reason"] == "abort"


async def test_flush_cache_fails_unless_idle(start: Start) -> None:
    client = await start(SLOW, real_time=True)
    asking = asyncio.create_task(client.post(CHAT, json=HELLO))
    await until_running(client)
    busy = await client.post("/flush_cache")
    await client.post("/abort_request", json={"abort_all": True})
    await asking
    idle = await client.post("/flush_cache")

    assert (busy.status, idle.status) == (400, 200)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (CHAT, {"model": "m"}, 400, "Field required"),
        (CHAT, {"messages": []}, 400, "Messages cannot be empty."),
        (CHAT, HELLO | {"max_tokens": 40_000}, 400, "maximum context length of 32768 tokens"),
        (CHAT, HELLO | {"temperature": -1}, 400, "temperature must be a non-negative finite number"),
        (CHAT, HELLO | {"tool_choice": "required"}, 400, "Tools cannot be empty"),
        (CHAT, HELLO | {"model": "m:lora"}, 400, "LoRA adapter 'lora' was requested"),
        ("/v1/completions", {"prompt": ""}, 400, "Prompt cannot be empty"),
        ("/v1/embeddings", {"input": "x"}, 400, "does not appear to be an embedding model"),
    ],
)
async def test_errors_have_sglangs_format(
    path: str, body: Any, status: int, message: str, start: Start
) -> None:
    client = await start()
    answer = await client.post(path, json=body)
    error = await answer.json()

    assert (answer.status, error["object"], error["code"], error["param"]) == (status, "error", status, None)
    assert message in error["message"]


async def test_api_key_is_required_except_for_probes_and_metrics(start: Start) -> None:
    client = await start(api_key="secret")
    paths = ("/v1/models", "/server_info", "/health", "/metrics")
    assert [(await client.get(path)).status for path in paths] == [401, 401, 200, 200]
    right, wrong = ({"Authorization": f"Bearer {key}"} for key in ("secret", "guess"))
    assert (await client.get("/v1/models", headers=right)).status == 200
    refused = await client.get("/v1/models", headers=wrong)
    assert (refused.status, await refused.json()) == (401, {"error": "Unauthorized"})


async def test_server_identifies_itself_as_emulated(start: Start) -> None:
    client = await start()
    models = await (await client.get("/v1/models")).json()
    server = await (await client.get("/server_info")).json()

    assert models["data"][0]["owned_by"] == "dps-engine (emulated)"
    assert (server["emulated"], server["version"]) == (True, "0.5.23+emulated")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/v1/loads", "/health", "/server_info"])
async def test_head_requests_are_refused_as_by_sglang(start: Start, path: str) -> None:
    client = await start()
    refused = await client.head(path)
    assert (refused.status, refused.headers["Allow"]) == (405, "GET")
    assert (await client.get(path)).status == 200


INFERENCE: dict[str, dict[str, Any]] = {
    CHAT: HELLO,
    "/v1/completions": {"model": "m", "prompt": "hello", "max_tokens": 4, "ignore_eos": True},
    "/v1/messages": {"model": "m", "messages": HELLO["messages"], "max_tokens": 4},
    "/v1/responses": {"model": "m", "input": "hello", "max_output_tokens": 4},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}},
}


@pytest.mark.parametrize("path", INFERENCE)
async def test_faults_are_injected_on_every_inference_api(start: Start, path: str) -> None:
    client = await start()
    await client.post("/emulate", json={"fail_next": 1, "status": 503})
    assert [(await client.post(path, json=INFERENCE[path])).status for _ in range(2)] == [503, 200]
    await client.post("/emulate", json={"disconnect_after_chunks": 1})
    answer = await client.post(path, json=INFERENCE[path] | {"stream": True})
    with pytest.raises((ClientPayloadError, ServerDisconnectedError, ConnectionResetError)):
        await answer.read()


async def test_faults_can_be_injected_and_cleared(start: Start) -> None:
    client = await start()
    await client.post("/emulate", json={"fail_next": 1, "status": 503, "ready": False})
    broken = [(await client.post(CHAT, json=HELLO)).status, (await client.get("/health")).status]
    after = (await client.post(CHAT, json=HELLO)).status
    await client.post("/emulate", json={})

    assert (broken, after, (await client.get("/health")).status) == ([503, 503], 200, 200)


async def test_stream_disconnects_after_the_requested_chunks(start: Start) -> None:
    client = await start()
    await client.post("/emulate", json={"disconnect_after_chunks": 2})
    answer = await client.post(CHAT, json=HELLO | {"stream": True})
    with pytest.raises((ClientPayloadError, ServerDisconnectedError, ConnectionResetError)):
        await answer.read()


async def test_hanging_engine_does_not_answer(start: Start) -> None:
    client = await start()
    await client.post("/emulate", json={"hang": True})
    asking = asyncio.create_task(client.post(CHAT, json=HELLO))
    probe = await client.get("/health")
    assert (asking.done(), probe.status) == (False, 200)
    asking.cancel()
    await asyncio.wait([asking])


async def test_unknown_fault_is_rejected(start: Start) -> None:
    client = await start()
    assert (await client.post("/emulate", json={"explode": True})).status == 400


GENERATE = {"sampling_params": {"max_new_tokens": 1}}


async def cached_tokens(client: TestClient[Any, Any], **fields: Any) -> list[int]:
    """The cached tokens of each prompt of a /generate request."""
    answer = await (await client.post("/generate", json=GENERATE | fields)).json()
    return [each["meta_info"]["cached_tokens"] for each in (answer if isinstance(answer, list) else [answer])]


async def test_prompts_share_the_cache_only_if_salt_and_extra_key_are_equal(start: Start) -> None:
    client = await start()
    prompt = {"input_ids": list(range(10))}
    salts: list[dict[str, Any]] = [
        {},
        {"cache_salt": "a"},
        {"extra_key": "a"},
        {"cache_salt": "a", "extra_key": "a"},
    ]
    for salt in salts:
        assert await cached_tokens(client, **prompt, **salt) == [0], salt
    for salt in (*salts, {"cache_salt": ""}, {"extra_key": ""}):
        assert await cached_tokens(client, **prompt, **salt) == [9], salt


async def test_batch_may_have_one_salt_for_each_prompt(start: Start) -> None:
    client = await start()
    batch = {"input_ids": [[1, 2, 3], [4, 5, 6]]}
    await cached_tokens(client, **batch, cache_salt=["a", "b"])
    assert await cached_tokens(client, **batch, cache_salt="a") == [2, 0]
    assert await cached_tokens(client, **batch, cache_salt=["a", ""]) == [2, 0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [1], "cache_salt": ["a"]}, "cache_salt should be a string for a single request."),
        (
            {"input_ids": [[1], [2]], "extra_key": ["a"]},
            "The length of extra_key should be equal to the batch size.",
        ),
    ],
)
async def test_salts_that_do_not_fit_the_prompts_are_refused(
    start: Start, body: dict[str, Any], message: str
) -> None:
    answer = await (await start()).post("/generate", json=GENERATE | body)
    assert (answer.status, (await answer.json())["error"]["message"]) == (400, message)
