"""The public port: the requests that the gateway answers itself, forwards or refuses."""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yarl
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from dps_gateway.api.job import LONG_BODY_BYTES
from dps_gateway.api.public import public_app
from dps_gateway.api.request import TIMEOUT_HEADER
from dps_gateway.api.server import Runner
from dps_gateway.auth import Key, Keys, digest_of
from dps_gateway.config import GatewayConfig
from dps_gateway.prompt.accounting import Prompt
from dps_gateway.runtime import Runtime
from dps_gateway.telemetry.json_log import JsonLog
from dps_testkit.tokenizers import shared_tokenizer
from dps_testkit.waiting import wait_until

CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2}
CHUNK = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}


async def complete(request: web.Request) -> web.StreamResponse:
    return web.json_response({"id": "c", "choices": [], "usage": USAGE})


class ScriptedEngine:
    """An engine that answers every request with `answer` and records what it received."""

    def __init__(self) -> None:
        self.answer: Answer = complete
        self.requests: list[tuple[str, dict[str, str], bytes]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append((request.raw_path, headers, await request.read()))
        return await self.answer(request)

    def stream(self, *pieces: bytes, abort: bool = False) -> None:
        """Answer with a stream of these pieces, then end it or break the connection."""

        async def answer(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for piece in pieces:
                await response.write(piece)
            if abort and request.transport is not None:
                await asyncio.sleep(0.05)
                request.transport.abort()
            return response

        self.answer = answer

    def respond(self, **options: Any) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(**options)

        self.answer = answer


class Gateway:
    """A gateway in this process in front of a scripted engine."""

    def __init__(self, runtime: Runtime, port: int, client: aiohttp.ClientSession) -> None:
        self.runtime = runtime
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.client = client

    def requests(self, status: int) -> float:
        """The number of requests that were counted with this status."""
        samples = (s for family in self.runtime.metrics.registry.collect() for s in family.samples)
        return sum(
            s.value for s in samples if s.name == "dps_requests_total" and s.labels["status"] == str(status)
        )

    async def post(self, path: str = CHAT, **options: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        return await self.send("POST", path, **options)

    async def send(self, method: str, path: str, **options: Any) -> tuple[aiohttp.ClientResponse, bytes]:
        async with self.client.request(method, self.url + path, **options) as response:
            return response, await response.read()

    async def raw(self, request: bytes) -> bytes:
        """The response to bytes that an HTTP client would not send."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request)
        async with asyncio.timeout(10):
            response = await reader.read()
        writer.close()
        return response


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def gateway(engine: ScriptedEngine) -> AsyncIterator[Gateway]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    port = unused_port()
    async with TestServer(app) as server, aiohttp.ClientSession() as client:
        pool = {"endpoints": [str(server.make_url(""))]}
        config = GatewayConfig.model_validate(
            {
                "model": {"name": "m", "tokenizer": "x"},
                "pools": {"speculative": pool, "greedy": pool},
                "limits": {"maxBodyBytes": 100_000},
            }
        )
        runtime = Runtime(config, shared_tokenizer())
        runner = Runner(public_app(runtime), handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield Gateway(runtime, port, client)
        await runner.cleanup()
        await runtime.close()


def message_of(content: bytes) -> str:
    error = json.loads(content)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["message"])


class TestOwnEndpoints:
    async def test_health_needs_no_key_and_follows_readiness(self, gateway: Gateway) -> None:
        gateway.runtime.keys = Keys()
        assert (await gateway.send("GET", "/health"))[0].status == 503
        for pool in gateway.runtime.pools.values():
            for replica in pool.replicas.values():
                replica.succeeded()
        assert (await gateway.send("GET", "/health"))[0].status == 200

    async def test_version_is_reported(self, gateway: Gateway) -> None:
        _, content = await gateway.send("GET", "/version")
        assert json.loads(content).keys() == {"version"}

    @pytest.mark.parametrize(
        "path", ["/v1/models", "/v1/models/m", "/v1/models/org%2Fm", "/model_info", "/server_info"]
    )
    async def test_information_about_the_model_comes_from_an_engine(
        self, gateway: Gateway, engine: ScriptedEngine, path: str
    ) -> None:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        response = await gateway.raw(head.encode())
        assert (response.split()[1], engine.requests[0][0]) == (b"200", path)

    async def test_unknown_path_is_a_json_404(self, gateway: Gateway) -> None:
        response, content = await gateway.send("GET", "/nothing")
        assert (response.status, message_of(content)) == (404, "there is no endpoint /nothing")

    async def test_wrong_method_is_a_json_405(self, gateway: Gateway) -> None:
        response, content = await gateway.send("GET", "/generate")
        assert (response.status, message_of(content)) == (405, "/generate does not support GET")
        assert "POST" in response.headers["Allow"]

    async def test_preflight_request_needs_no_key(self, gateway: Gateway) -> None:
        gateway.runtime.keys = Keys()
        headers = {
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        response, _ = await gateway.send("OPTIONS", CHAT, headers=headers)
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        refused, _ = await gateway.post(json=chat(), headers={"Origin": "https://app.example"})
        assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (401, "*")


class TestMalformedRequests:
    async def test_credentials_appear_neither_in_logs_nor_in_responses(
        self, gateway: Gateway, caplog: pytest.LogCaptureFixture
    ) -> None:
        response = await gateway.raw(
            b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer sk-secret\x01\r\n\r\n"
        )
        assert response.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
        assert b'"error"' in response
        assert b"sk-secret" not in response
        assert "malformed request" in caplog.text
        assert "sk-secret" not in caplog.text

    async def test_absolute_target_is_forwarded_as_a_path(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        target = f"http://127.0.0.1:{gateway.port}/v1/models?a=1"
        response = await gateway.raw(
            f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        )
        assert response.startswith(b"HTTP/1.1 200 ")
        assert engine.requests[0][0] == "/v1/models?a=1"

    @pytest.mark.parametrize("header", ["x-session-id", "x-request-id", "x-other"])
    async def test_header_that_is_not_utf8_is_ignored(
        self, gateway: Gateway, engine: ScriptedEngine, header: str
    ) -> None:
        body = json.dumps(chat()).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        response = await gateway.raw(head.encode() + f"{header}: caf".encode() + b"\xe9\r\n\r\n" + body)
        assert response.startswith(b"HTTP/1.1 200 ")
        assert engine.requests[0][1].get(header) != "caf\xe9"

    async def test_deeply_nested_request_reaches_the_engine(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        nested = "[" * 400 + "]" * 400
        body = json.dumps(chat(stream=True, stream_options={})).replace("{}", '{"x": ' + nested + "}")
        engine.stream(CHUNK, DONE)
        response, content = await gateway.post(data=body.encode())
        assert (response.status, content) == (200, CHUNK + DONE)

    @pytest.mark.parametrize(
        "path",
        [
            "/v1/../flush_cache",
            "/v1/%2e%2e/flush_cache",
            "/v1/..%2fflush_cache",
            "/v1/..%5cflush_cache",
            "/v1//flush_cache",
            "/v1/x/..",
            "/v1/chat%2Fcompletions",
            "/v1/chat/completion%73",
        ],
    )
    async def test_path_that_an_engine_may_resolve_differently_is_refused(
        self, gateway: Gateway, engine: ScriptedEngine, path: str
    ) -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        response = await gateway.raw(head.encode())
        assert response.split()[1] in (b"400", b"404")
        assert engine.requests == []

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            (CHAT, chat(input_ids=[])),
            ("/v1/completions", {"prompt": [[""]]}),
            ("/v1/completions", {"prompt": ["x", []]}),
            ("/generate", {"text": ""}),
            ("/generate", {"input_ids": [[]]}),
        ],
    )
    async def test_empty_prompt_is_refused(
        self, gateway: Gateway, engine: ScriptedEngine, path: str, body: Any
    ) -> None:
        response, content = await gateway.post(path, json=body)
        assert (response.status, engine.requests) == (400, [])
        assert message_of(content).startswith("a prompt is empty")


class TestForwardedRequests:
    async def test_compressed_body_is_forwarded_without_its_encoding(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        body = json.dumps(chat()).encode()
        headers = {"Content-Encoding": "gzip"}
        response, _ = await gateway.post(data=gzip.compress(body), headers=headers)
        assert response.status == 200
        assert "content-encoding" not in engine.requests[0][1]
        assert engine.requests[0][2] == body

    async def test_decompressed_body_counts_against_the_limit(self, gateway: Gateway) -> None:
        body = gzip.compress(b"x" * 200_000)
        response, _ = await gateway.post(data=body, headers={"Content-Encoding": "gzip"})
        assert response.status == 413

    async def test_body_size_limit_can_be_reloaded(self, gateway: Gateway) -> None:
        data = gateway.runtime.config.model_dump(by_alias=True)
        data["limits"]["maxBodyBytes"] = 10
        gateway.runtime.apply(GatewayConfig.model_validate(data))
        response, content = await gateway.post(json=chat())
        assert response.status == 413
        assert "larger than 10 bytes" in message_of(content)

    async def test_hop_by_hop_headers_are_not_forwarded(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        headers = {"Connection": "keep-alive, X-Hop", "X-Hop": "1", "Proxy-Connection": "keep-alive"}
        await gateway.post(json=chat(), headers={**headers, "X-Kept": "1"})
        sent = engine.requests[0][1]
        assert "x-kept" in sent
        assert not {"x-hop", "proxy-connection"} & sent.keys()


class TestAnswers:
    async def test_engine_address_is_removed_from_redirects(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        engine.respond(status=307, headers={"Location": "http://10.0.0.1:30000/v1/models?a=1"})
        response, _ = await gateway.send("GET", "/v1/models/", allow_redirects=False)
        assert response.headers["Location"] == "/v1/models?a=1"

    @pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ('{"object":"error","message":"too long","type":"BadRequestError","code":400}', "too long"),
            ('{"detail":"Not Found"}', "Not Found"),
            ("plain text", "plain text"),
            ("", "the engine answered 400"),
            ('{"error":{"message":"as is","type":"t","param":null,"code":null}}', "as is"),
        ],
    )
    async def test_error_of_the_engine_becomes_an_openai_error_object(
        self, gateway: Gateway, engine: ScriptedEngine, path: str, body: str, message: str
    ) -> None:
        engine.respond(status=400, text=body)
        response, content = await gateway.post(path, json=chat())
        assert (response.status, response.content_type) == (400, "application/json")
        assert message_of(content) == message
        assert response.headers["x-dps-pool"]

    async def test_retry_after_of_the_engine_is_relayed(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        engine.respond(status=503, text="loading", headers={"Retry-After": "17"})
        response, content = await gateway.post(json=chat())
        assert (response.status, response.headers["Retry-After"]) == (503, "17")
        assert message_of(content) == "loading"
        assert {"x-dps-pool", "x-dps-prompt-tokens", "x-dps-session"} <= {
            name.lower() for name in response.headers
        }

    async def test_invalid_usage_does_not_disturb_the_stream(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        usage = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":"n/a"}}\n\n'
        engine.stream(CHUNK, usage, DONE)
        _, content = await gateway.post(json=chat(stream=True, stream_options={"include_usage": True}))
        assert content == CHUNK + usage + DONE

    async def test_failure_after_the_headers_closes_the_connection(
        self, gateway: Gateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail(*arguments: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(gateway.runtime.turns, "commit", fail)
        engine.stream(CHUNK, DONE)
        with pytest.raises(aiohttp.ClientError):
            await gateway.post(json=chat(stream=True))
        assert gateway.requests(500) == 1

    async def test_failed_accounting_does_not_disturb_the_answer(
        self, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def fail(*arguments: object) -> bool:
            raise RuntimeError("a bug")

        monkeypatch.setattr(gateway.runtime.turns, "correct", fail)
        response, content = await gateway.post(json=chat())
        assert (response.status, json.loads(content)["usage"]) == (200, USAGE)

    async def test_answer_is_counted_if_the_client_closes_after_the_last_byte(self, gateway: Gateway) -> None:
        body = json.dumps(chat()).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(head + body)
            await reader.readuntil(b"}}")
            writer.transport.abort()

        async def counted() -> bool:
            return gateway.requests(200) + gateway.requests(499) == 10

        await wait_until(counted, "all requests are counted")
        assert (gateway.requests(200), gateway.requests(499)) == (10, 0)
        labels = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "m"}
        name = "gen_ai_server_request_duration_seconds_count"
        assert gateway.runtime.metrics.registry.get_sample_value(name, labels) == 10

    async def test_connection_broken_after_done_is_a_complete_answer(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        engine.stream(CHUNK, DONE, abort=True)
        _, content = await gateway.post(json=chat(stream=True))
        assert content == CHUNK + DONE

    async def test_stream_that_ends_without_done_ends_with_an_error_event(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        engine.stream(CHUNK)
        _, content = await gateway.post(json=chat(stream=True))
        assert content.startswith(CHUNK)
        assert (
            message_of(content.removeprefix(CHUNK + b"data: "))
            == "the engine ended the stream without [DONE]"
        )

    async def test_client_that_stops_reading_is_disconnected(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        data = gateway.runtime.config.model_dump(by_alias=True)
        data["timeouts"]["totalSeconds"] = 0.5
        gateway.runtime.apply(GatewayConfig.model_validate(data))
        engine.stream(*[b"data: " + b"x" * 500_000 + b"\n\n"] * 100, DONE)
        body = json.dumps(chat(stream=True)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1)
        writer.write(head + body)

        async def given_up() -> bool:
            return gateway.requests(499) == 1

        await wait_until(given_up, "the gateway closes the connection")
        assert sum(pool.in_flight for pool in gateway.runtime.pools.values()) == 0
        writer.transport.abort()


async def test_event_loop_runs_while_a_long_chat_is_rendered(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering 200,000 messages takes half a second, in which other requests must be served."""
    begun, other_served = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    render = gateway.runtime.accountant.chat

    def slow(body: dict[str, Any]) -> Prompt:
        loop.call_soon_threadsafe(begun.set)
        assert other_served.wait(10), "no other request was served meanwhile"
        return render(body)

    monkeypatch.setattr(gateway.runtime.accountant, "chat", slow)
    limits = gateway.runtime.config.limits.model_copy(update={"max_body_bytes": 2 * LONG_BODY_BYTES})
    gateway.runtime.config = gateway.runtime.config.model_copy(update={"limits": limits})
    long = asyncio.create_task(gateway.post(json=chat(user="x" * LONG_BODY_BYTES)))
    await asyncio.wait_for(begun.wait(), 60)
    await gateway.send("GET", "/version")
    other_served.set()
    assert (await long)[0].status == 200


class TestKeyLimits:
    async def test_key_may_use_only_its_models(self, gateway: Gateway, engine: ScriptedEngine) -> None:
        gateway.runtime.keys = Keys([Key("team", digest_of("sk"), models=frozenset({"m"}))])
        headers = {"Authorization": "Bearer sk"}
        assert (await gateway.post(json=chat(), headers=headers))[0].status == 200
        for path in (CHAT, "/v1/embeddings"):
            response, content = await gateway.post(path, json=chat(model="other"), headers=headers)
            assert (response.status, json.loads(content)["error"]["code"]) == (403, "model_not_allowed")
        assert len(engine.requests) == 1

    async def test_requests_in_flight_of_a_key_are_limited(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        gateway.runtime.keys = Keys([Key("team", digest_of("sk"), max_in_flight=1)])
        received, release = asyncio.Event(), asyncio.Event()

        async def slow(request: web.Request) -> web.StreamResponse:
            received.set()
            await release.wait()
            return await complete(request)

        engine.answer = slow
        headers = {"Authorization": "Bearer sk"}
        first = asyncio.create_task(gateway.post(json=chat(), headers=headers))
        await received.wait()
        response, content = await gateway.post(json=chat(), headers=headers)
        assert (response.status, json.loads(content)["error"]["code"]) == (429, "too_many_in_flight")
        assert response.headers["Retry-After"] == "1"
        release.set()
        assert (await first)[0].status == 200
        assert (await gateway.post(json=chat(), headers=headers))[0].status == 200


class TestModels:
    @pytest.fixture(autouse=True)
    def model(self, gateway: Gateway) -> None:
        config = gateway.runtime.config
        model = config.model.model_copy(update={"aliases": {"gpt": "m", "tuned": "m:lora"}, "strict": True})
        gateway.runtime.config = config.model_copy(update={"model": model})

    @pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
    @pytest.mark.parametrize(
        ("asked", "forwarded"),
        [
            ({"model": "m"}, {"model": "m"}),
            ({"model": "m:lora"}, {"model": "m:lora"}),
            ({"model": "gpt"}, {"model": "m"}),
            ({"model": "gpt:lora"}, {"model": "m:lora"}),
            ({"model": "tuned"}, {"model": "m:lora"}),
            ({"model": ""}, {"model": ""}),
            ({}, {}),
        ],
    )
    async def test_alias_is_replaced(
        self,
        gateway: Gateway,
        engine: ScriptedEngine,
        path: str,
        asked: dict[str, str],
        forwarded: dict[str, str],
    ) -> None:
        rest = {"messages": [{"role": "user", "content": "hello"}]}
        assert (await gateway.post(path, json=rest | asked))[0].status == 200
        assert json.loads(engine.requests[0][2]) == rest | forwarded

    @pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
    @pytest.mark.parametrize("asked", ["other", "mm", "other:lora", ["m"], 1])
    async def test_unknown_model_is_not_found(
        self, gateway: Gateway, engine: ScriptedEngine, path: str, asked: Any
    ) -> None:
        response, content = await gateway.post(path, json=chat(model=asked))
        assert (response.status, json.loads(content)["error"]["code"]) == (404, "model_not_found")
        assert (
            message_of(content) == f"the model '{asked}' is not served; the served models are m, gpt, tuned"
        )
        assert engine.requests == []

    async def test_body_that_is_not_json_is_relayed(self, gateway: Gateway, engine: ScriptedEngine) -> None:
        audio = {"Content-Type": "audio/wav"}
        response, _ = await gateway.post("/v1/audio/transcriptions", data=b"RIFF", headers=audio)
        assert (response.status, engine.requests[0][2]) == (200, b"RIFF")

    async def test_alias_and_model_are_one_session(self, gateway: Gateway) -> None:
        for model, history in (("gpt", "new"), ("m", "grown")):
            response, _ = await gateway.post(json=chat(model=model), headers={"x-session-id": "s"})
            assert response.headers["x-dps-history"] == history


async def test_stalled_stream_ends_with_an_error_event_when_the_clients_time_is_over(
    gateway: Gateway, engine: ScriptedEngine
) -> None:
    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(CHUNK)
        await asyncio.sleep(60)
        return response

    engine.answer = stall
    _, content = await gateway.post(json=chat(stream=True), headers={TIMEOUT_HEADER: "4000"})
    assert content.startswith(CHUNK)
    assert message_of(content.removeprefix(CHUNK + b"data: ")) == "the answer took longer than 4 s"


async def test_access_log_has_one_line_per_request_without_prompts_and_keys(
    gateway: Gateway, engine: ScriptedEngine, tmp_path: Path
) -> None:
    path = tmp_path / "access.jsonl"
    gateway.runtime.access_log = JsonLog(path)
    gateway.runtime.keys = Keys([Key("team", digest_of("sk-secret"))])
    headers = {"Authorization": "Bearer sk-secret", "x-request-id": "r"}
    response, _ = await gateway.post(json=chat(user="private"), headers=headers)
    await gateway.send("GET", "/v1/models?secret=x", headers={"x-api-key": "sk-wrong", "x-request-id": "q"})
    await gateway.runtime.access_log.flush()
    content = path.read_text()
    entries = [json.loads(line) for line in content.splitlines()]
    for entry in entries:
        assert 0 <= entry.pop("seconds") <= time.time() - entry.pop("time") + 1
    chat_entry = {
        "request_id": "r",
        "tenant": "team",
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "pool": response.headers["x-dps-pool"],
        "prompt_tokens": USAGE["prompt_tokens"],
        "output_tokens": USAGE["completion_tokens"],
        "cached_tokens": None,
    }
    refused = dict.fromkeys(chat_entry) | {
        "request_id": "q",
        "tenant": "",
        "method": "GET",
        "route": "/v1/*",
        "status": 401,
    }
    assert entries == [chat_entry, refused]
    assert not any(word in content for word in ("private", "sk-", "secret", digest_of("sk-secret").hex()[:8]))


MESSAGES = "/v1/messages"
STARTED = b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg","usage":{"input_tokens":9}}}\n\n'
STOPPED = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def message(**fields: Any) -> dict[str, Any]:
    return chat(max_tokens=8, **fields)


class TestMessages:
    """Anthropic's Messages API."""

    async def test_stream_is_relayed_unchanged(self, gateway: Gateway, engine: ScriptedEngine) -> None:
        engine.stream(STARTED, STOPPED)
        response, content = await gateway.post(MESSAGES, json=message(stream=True))
        assert content == STARTED + STOPPED
        assert response.headers["x-dps-history"] == "new"

    async def test_stream_that_ends_early_ends_with_an_anthropic_error_event(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        engine.stream(STARTED)
        _, content = await gateway.post(MESSAGES, json=message(stream=True))
        event, _, data = content.removeprefix(STARTED).partition(b"\ndata: ")
        assert event == b"event: error"
        assert json.loads(data) == {
            "type": "error",
            "error": {"type": "api_error", "message": "the engine ended the stream without message_stop"},
        }

    @pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
    @pytest.mark.parametrize(
        ("status", "body", "error"),
        [
            (
                400,
                '{"type":"error","error":{"type":"t","message":"as is"}}',
                {"type": "t", "message": "as is"},
            ),
            (401, '{"error":"Unauthorized"}', {"type": "authentication_error", "message": "Unauthorized"}),
            (404, '{"detail":"Not Found"}', {"type": "not_found_error", "message": "Not Found"}),
            (500, "plain text", {"type": "api_error", "message": "plain text"}),
            (503, "loading", {"type": "overloaded_error", "message": "loading"}),
        ],
    )
    async def test_error_of_the_engine_becomes_an_anthropic_error_object(
        self, gateway: Gateway, engine: ScriptedEngine, path: str, status: int, body: str, error: Any
    ) -> None:
        engine.respond(status=status, text=body)
        response, content = await gateway.post(path, json=message())
        assert response.status == status
        assert json.loads(content) == {"type": "error", "error": error}

    @pytest.mark.parametrize(
        ("method", "path", "body", "status", "kind"),
        [
            ("POST", MESSAGES, b"{", 400, "invalid_request_error"),
            ("POST", MESSAGES, b"[]", 400, "invalid_request_error"),
            ("POST", f"{MESSAGES}/../x", b"{}", 400, "invalid_request_error"),
        ],
        ids=["not JSON", "not an object", "malformed path"],
    )
    async def test_errors_of_the_gateway_are_anthropic_error_objects(
        self, gateway: Gateway, method: str, path: str, body: bytes, status: int, kind: str
    ) -> None:
        target = yarl.URL(gateway.url + path, encoded=True)
        async with gateway.client.request(method, target, data=body) as response:
            document = await response.json()
        assert (response.status, document["type"], document["error"]["type"]) == (status, "error", kind)

    async def test_credential_in_x_api_key_is_accepted_and_not_forwarded(
        self, gateway: Gateway, engine: ScriptedEngine
    ) -> None:
        gateway.runtime.keys = Keys([Key("team", digest_of("sk-ant"))])
        sent = {"x-api-key": "sk-ant", "anthropic-version": "2023-06-01"}
        response, _ = await gateway.post(MESSAGES, json=message(), headers=sent)
        refused, content = await gateway.post(MESSAGES, json=message(), headers={"x-api-key": "no"})
        ((path, received, body),) = engine.requests
        assert (response.status, path, json.loads(body)) == (200, MESSAGES, message())
        assert (received.get("x-api-key"), received["anthropic-version"]) == (None, "2023-06-01")
        assert (refused.status, json.loads(content)["error"]["type"]) == (401, "authentication_error")

    async def test_query_does_not_prevent_routing(self, gateway: Gateway, engine: ScriptedEngine) -> None:
        response, _ = await gateway.post(f"{MESSAGES}?beta=true", json=message())
        assert response.headers["x-dps-history"] == "new"
        assert [path for path, _, _ in engine.requests] == [MESSAGES]

    async def test_chat_and_messages_with_the_same_prompt_share_a_session(self, gateway: Gateway) -> None:
        first, _ = await gateway.post(CHAT, json=chat())
        grown = [*chat()["messages"], {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
        second, _ = await gateway.post(MESSAGES, json=message() | {"messages": grown})
        assert second.headers["x-dps-session"] == first.headers["x-dps-session"]
        assert second.headers["x-dps-history"] == "grown"
