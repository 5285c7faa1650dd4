"""API keys that are limited to some models, or in the number of requests."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from dps_gateway.api.call import TIMEOUT_HEADER
from dps_gateway.auth import Key, Keys, digest_of
from dps_testkit.in_process_gateway import (
    CHAT,
    CHUNK,
    DONE,
    USAGE,
    HeldAnswers,
    InProcessGateway,
    ScriptedEngine,
    chat,
    complete,
    send_stream,
)
from tests.gateway.servers import until


async def test_key_may_use_only_its_models(gateway: InProcessGateway, engine: ScriptedEngine) -> None:
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), models=frozenset({"m"}))])
    headers = {"Authorization": "Bearer sk"}
    assert (await gateway.post(json=chat(), headers=headers))[0].status == 200
    for path in (CHAT, "/v1/embeddings"):
        response, content = await gateway.post(path, json=chat(model="m:other"), headers=headers)
        assert (response.status, json.loads(content)["error"]["code"]) == (403, "model_not_allowed")
    assert len(engine.requests) == 1


async def test_requests_in_flight_of_a_key_are_limited(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), max_in_flight=1)])
    engine.answer = held = HeldAnswers()
    headers = {"Authorization": "Bearer sk"}
    first = asyncio.create_task(gateway.post(json=chat(), headers=headers))
    await held.received.wait()
    response, content = await gateway.post(json=chat(), headers=headers)
    assert (response.status, json.loads(content)["error"]["code"]) == (429, "too_many_in_flight")
    assert response.headers["Retry-After"] == "1"
    held.release.set()
    assert (await first)[0].status == 200
    assert (await gateway.post(json=chat(), headers=headers))[0].status == 200


async def check_exhausted(gateway: InProcessGateway, headers: dict[str, str]) -> None:
    """A further request of the key is refused."""
    response, content = await gateway.post(json=chat(), headers=headers)
    assert (response.status, json.loads(content)["error"]["code"]) == (429, "rate_limit_exceeded")


async def client_has_left(gateway: InProcessGateway) -> None:
    """Wait until the gateway has noticed that a client has disconnected."""
    await until(lambda: gateway.requests(499) == 1, "the gateway notices that the client has disconnected")


@pytest.mark.parametrize("usage", [USAGE, None], ids=["reported", "not reported"])
async def test_tokens_of_a_key_per_minute_are_limited(
    gateway: InProcessGateway, engine: ScriptedEngine, usage: dict[str, int] | None
) -> None:
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), tokens_per_minute=1)])
    engine.respond(body=json.dumps({"choices": [], "usage": usage}), content_type="application/json")
    headers = {"Authorization": "Bearer sk"}
    assert (await gateway.post(json=chat(), headers=headers))[0].status == 200
    await check_exhausted(gateway, headers)


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "streamed"])
async def test_tokens_of_all_answers_to_a_batch_count_for_its_key(
    gateway: InProcessGateway, engine: ScriptedEngine, stream: bool
) -> None:
    """Every event of a stream reports the tokens of one answer until then."""
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), tokens_per_minute=1000)])

    def answer(index: int, tokens: int) -> dict[str, Any]:
        return {"text": "a", "meta_info": {"prompt_tokens": 1, "completion_tokens": tokens}, "index": index}

    if stream:
        parts = [answer(index, tokens) for tokens in (1, 600) for index in (0, 1)]
        engine.stream(*(f"data: {json.dumps(part)}\n\n".encode() for part in parts), DONE)
    else:
        engine.respond(body=json.dumps([answer(0, 600), answer(1, 600)]), content_type="application/json")
    headers = {"Authorization": "Bearer sk"}
    body = {"text": ["a", "b"], "stream": stream}
    assert (await gateway.post("/generate", json=body, headers=headers))[0].status == 200
    await check_exhausted(gateway, headers)


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "streamed"])
@pytest.mark.parametrize("header", [{}, {TIMEOUT_HEADER: "500"}], ids=["client", "time limit"])
async def test_prompt_of_an_abandoned_request_counts_for_its_key(
    gateway: InProcessGateway, engine: ScriptedEngine, stream: bool, header: dict[str, str]
) -> None:
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), tokens_per_minute=1)])
    received = asyncio.Event()

    async def never(request: web.Request) -> web.StreamResponse:
        received.set()
        await asyncio.sleep(30)
        return await complete(request)

    engine.answer = never
    headers = {"Authorization": "Bearer sk"}
    abandoned = asyncio.create_task(gateway.post(json=chat(stream=stream), headers=headers | header))
    await received.wait()
    if header:
        assert (await abandoned)[0].status == 504
    else:
        abandoned.cancel()
        await client_has_left(gateway)
    await check_exhausted(gateway, headers)


@pytest.mark.parametrize(("tokens_per_event", "limit"), [(1, 1000), (4, 4000)])
async def test_answer_that_the_client_does_not_read_to_its_end_counts_for_its_key(
    gateway: InProcessGateway, engine: ScriptedEngine, tokens_per_event: int, limit: int
) -> None:
    """With speculation, an event has several tokens, as the usage of complete answers shows."""
    events = limit // tokens_per_event
    usage = {"prompt_tokens": 9, "completion_tokens": (100 + 2) * tokens_per_event}
    ending = f'data: {{"choices":[],"usage":{json.dumps(usage)}}}\n\n'.encode()
    engine.stream(CHUNK * 100, ending, DONE)
    await gateway.post(json=chat(stream=True))
    gateway.runtime.keys = Keys([Key("team", digest_of("sk"), tokens_per_minute=limit)])

    async def endless(request: web.Request) -> web.StreamResponse:
        response = await send_stream(request, [CHUNK * events])
        await asyncio.sleep(30)
        return response

    engine.answer = endless
    headers = {"Authorization": "Bearer sk"}
    async with gateway.client.post(gateway.url + CHAT, json=chat(stream=True), headers=headers) as stream:
        await stream.content.readexactly(len(CHUNK) * events)
        stream.close()
    await client_has_left(gateway)
    await check_exhausted(gateway, headers)
