"""Cache salts: each tenant has its own KV cache in the engines, whatever salt its requests carry."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.api.cache_salt import SALT_HEADER, with_salt
from dps_gateway.api.errors import BadRequest
from dps_gateway.api.public import public_app
from dps_gateway.auth import Keys
from dps_gateway.config import GatewayConfig
from dps_gateway.pool import Pool
from dps_gateway.prompt.separation import CacheSalt
from dps_gateway.runtime import Runtime
from dps_gateway.upstream.replica import UNKNOWN, Configuration
from dps_testkit.tokenizers import shared_tokenizer

CHAT = "/v1/chat/completions"
KEYS = "team-a:sk-alpha\nteam-b:sk-beta\n"
MESSAGES = [{"role": "user", "content": "hello"}]
BOTH = ("cache_salt", "extra_key")
SALT, OTHER = CacheSalt(b"a"), CacheSalt(b"b")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def load_keys(folder: Path, text: str) -> Keys:
    path = folder / "keys"
    path.write_text(text)
    return Keys.load(path)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param({"n": 1}, {"n": 1, "cache_salt": SALT.of(None)}, id="no salt"),
        pytest.param({}, {"cache_salt": SALT.of(None)}, id="empty object"),
        pytest.param({"cache_salt": None}, {"cache_salt": SALT.of(None)}, id="null"),
        pytest.param({"cache_salt": ""}, {"cache_salt": SALT.of(None)}, id="empty string"),
        pytest.param({"cache_salt": "x"}, {"cache_salt": SALT.of("x")}, id="string"),
        pytest.param(
            {"cache_salt": ["x", ""]}, {"cache_salt": [SALT.of("x"), SALT.of(None)]}, id="list for a batch"
        ),
        pytest.param({"cache_salt": OTHER.of(None)}, {"cache_salt": SALT.of(OTHER.of(None))}, id="foreign"),
    ],
)
def test_salt_is_added_to_the_request_as_sent_and_as_parsed(
    body: dict[str, Any], expected: dict[str, Any]
) -> None:
    raw, parsed = with_salt(json.dumps(body).encode(), body, ("cache_salt",), SALT)
    assert (json.loads(raw), parsed) == (expected, expected)


def test_bytes_of_a_request_without_salt_are_kept() -> None:
    raw = b' { "seed": 1e2, "n": 1 }'
    sent, _ = with_salt(raw, {"seed": 100.0, "n": 1}, BOTH, SALT)
    own = SALT.of(None)
    assert sent == b' {"cache_salt":"%b","extra_key":"%b", "seed": 1e2, "n": 1 }' % ((own.encode(),) * 2)


def test_request_to_an_endpoint_without_a_salt_is_unchanged() -> None:
    assert with_salt(b'{"n": 1}', {"n": 1}, (), SALT) == (b'{"n": 1}', {"n": 1})


def test_salt_that_the_client_sent_twice_is_replaced() -> None:
    raw = b'{"cache_salt": "x", "cache_\\u0073alt": "y"}'
    sent, _ = with_salt(raw, json.loads(raw), ("cache_salt",), SALT)
    assert sent == b'{"cache_salt":"%b"}' % SALT.of("y").encode()


@pytest.mark.parametrize("value", [1, True, {"a": 1}, [1], ["x", None], [["x"]]])
def test_salt_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(BadRequest, match="cache_salt must be a string, or a list of one string"):
        with_salt(b"{}", {"cache_salt": value}, ("cache_salt",), SALT)


@given(TEXT, TEXT)
def test_tenants_never_have_the_same_salt(one: str, other: str) -> None:
    assert SALT.of(one) != OTHER.of(other)
    assert (SALT.of(one) == SALT.of(other)) == (one == other)


def test_secret_depends_on_the_tenant_and_on_its_first_key(tmp_path: Path) -> None:
    before = load_keys(tmp_path, "a:one\nb:two\n")
    added = load_keys(tmp_path, "c:first\na:one\nb:two\na:three\n")
    replaced = load_keys(tmp_path, "a:three\nb:two\n")
    assert before.secret("a") == added.secret("a") != replaced.secret("a")
    assert before.secret("b") == replaced.secret("b") != before.secret("a")


class Gateway:
    """A gateway with an engine that records the bodies and the headers with salts that it receives."""

    def __init__(
        self, runtime: Runtime, client: TestClient[Any, Any], received: list[bytes], salts: list[str | None]
    ) -> None:
        self.runtime = runtime
        self.received = received
        self.salts = salts
        self._client = client

    async def post(
        self, body: Any, key: str = "sk-alpha", path: str = CHAT, own_header: str = ""
    ) -> tuple[int, dict[str, str]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"} | ({SALT_HEADER: own_header} if own_header else {})
        response = await self._client.post(path, data=data, headers=headers)
        await response.read()
        return response.status, dict(response.headers)

    async def sent(self, body: Any, key: str = "sk-alpha", path: str = CHAT) -> Any:
        """The body that the engine receives for this request."""
        assert (await self.post(body, key, path))[0] == 200
        return json.loads(self.received[-1])


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    received: list[bytes] = []
    salts: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        received.append(await request.read())
        salts.append(request.headers.get(SALT_HEADER))
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    async with TestServer(app) as engine:
        pool = {"endpoints": [str(engine.make_url(""))]}
        config = GatewayConfig.model_validate(
            {"model": {"name": "m", "tokenizer": "x"}, "pools": {"speculative": pool, "greedy": pool}}
        )
        runtime = Runtime(config, shared_tokenizer())
        runtime.keys = load_keys(tmp_path, KEYS)
        for engines in runtime.pools.values():
            for replica in engines.replicas.values():
                replica.configuration = Configuration(salt_header=SALT_HEADER)
        async with TestClient(TestServer(public_app(runtime))) as client:
            yield Gateway(runtime, client, received, salts)
        await runtime.close()


@pytest.mark.parametrize(
    ("path", "body", "fields"),
    [
        pytest.param(CHAT, {"messages": MESSAGES}, ("cache_salt",), id="chat"),
        pytest.param(CHAT, {"messages": MESSAGES, "stream": True}, ("cache_salt",), id="stream"),
        pytest.param(
            CHAT,
            {"messages": MESSAGES, "stream": True, "stream_options": None},
            ("cache_salt",),
            id="stream-options",
        ),
        pytest.param("/v1/completions", {"prompt": "once"}, ("cache_salt",), id="completions"),
        pytest.param("/v1/completions", {"prompt": ["a", "b"]}, ("cache_salt",), id="batch"),
        pytest.param("/generate", {"text": "once"}, BOTH, id="generate"),
        pytest.param("/v1/responses", {"input": "once"}, ("cache_salt",), id="responses"),
        pytest.param("/v1/respon%73es", {"input": "once"}, ("cache_salt",), id="encoded-path"),
    ],
)
async def test_every_endpoint_with_a_salt_receives_the_tenants(
    gateway: Gateway, path: str, body: dict[str, Any], fields: tuple[str, ...]
) -> None:
    alpha = await gateway.sent(body, "sk-alpha", path)
    beta = await gateway.sent(body, "sk-beta", path)
    again = await gateway.sent(body, "sk-alpha", path)
    assert alpha == again
    for field in fields:
        assert alpha[field] != beta[field]
    ignored = {*fields, "stream_options"}
    rest = [{key: value for key, value in sent.items() if key not in ignored} for sent in (alpha, beta)]
    assert rest == [{key: value for key, value in body.items() if key not in ignored}] * 2


WITHOUT_A_FIELD = [
    "/v1/messages",
    *("/v1/score", "/score", "/v1/sc%6Fre"),
    *("/rerank", "/v1/rerank", "/v2/rerank"),
    *("/v1/decisions", "/v1/systemone"),
]
"""Endpoints that cache prompts, and whose requests have no field for a salt."""


@pytest.mark.parametrize("path", [*WITHOUT_A_FIELD, "/v1/embeddings", "/classify"])
async def test_requests_without_a_field_for_the_salt_carry_the_tenants_in_a_header(
    gateway: Gateway, path: str
) -> None:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    for key in ("sk-alpha", "sk-beta", "sk-alpha"):
        await gateway.post(body, key, path)
    alpha, beta, again = gateway.salts
    assert alpha == again
    assert None not in {alpha, beta}
    assert alpha != beta
    assert [json.loads(sent) for sent in gateway.received] == [body] * 3


@pytest.mark.parametrize("path", WITHOUT_A_FIELD)
@pytest.mark.parametrize("configuration", [None, UNKNOWN], ids=["unknown", "without the plugin"])
async def test_requests_whose_salt_no_engine_reads_are_refused(
    gateway: Gateway, configuration: Configuration | None, path: str
) -> None:
    for pool in gateway.runtime.pools.values():
        for replica in pool.replicas.values():
            replica.configuration = configuration
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    assert (await gateway.post(body, path=path))[0] == 503
    assert gateway.received == []
    assert (await gateway.post(body))[0] == 200
    assert (await gateway.post(body, path="/v1/embeddings"))[0] == 200


async def test_requests_whose_salt_is_in_a_header_are_sent_to_an_engine_that_reads_it(
    gateway: Gateway,
) -> None:
    greedy = gateway.runtime.pools[Pool.GREEDY]
    greedy.set_endpoints(["http://127.0.0.1:9", *greedy.replicas])  # nothing listens there
    gateway.runtime.pools[Pool.SPECULATIVE].set_endpoints([])
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    for number in range(6):
        assert (await gateway.post(body | {"metadata": {"user_id": f"{number}"}}, path="/v1/messages"))[
            0
        ] == 200


async def test_single_tenant_needs_no_engine_that_reads_its_salt(gateway: Gateway, tmp_path: Path) -> None:
    gateway.runtime.keys = load_keys(tmp_path, "alpha:sk-alpha\n")
    for pool in gateway.runtime.pools.values():
        for replica in pool.replicas.values():
            replica.configuration = UNKNOWN
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    assert (await gateway.post(body, path="/v1/messages"))[0] == 200


@pytest.mark.parametrize("path", ["/v1/messages", CHAT, "/v1/embeddings"])
async def test_clients_cannot_choose_the_salt_header(gateway: Gateway, path: str) -> None:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    await gateway.post(body, path=path)
    await gateway.post(body, path=path, own_header="that of another tenant")
    own, forged = gateway.salts
    assert own == forged


@pytest.mark.parametrize("body", [b'{"input": NaN}', b"[]", b"{"])
async def test_body_that_cannot_carry_a_salt_is_not_relayed(gateway: Gateway, body: bytes) -> None:
    assert (await gateway.post(body, path="/v1/responses"))[0] == 400
    assert gateway.received == []


async def test_forwarded_bytes_are_the_clients_without_tenants_or_isolation(gateway: Gateway) -> None:
    raw = b'{ "messages": [{"role": "user", "content": "hello"}], "cache_salt": ["any", 1] }'
    gateway.runtime.config = gateway.runtime.config.model_copy(
        update={"auth": gateway.runtime.config.auth.model_copy(update={"isolate_cache": False})}
    )
    await gateway.post(raw)
    gateway.runtime.keys = None
    await gateway.post(raw)
    await gateway.post(raw, path="/v1/responses")
    assert gateway.received == [raw] * 3


async def test_new_secret_of_a_tenant_makes_the_whole_prompt_new(gateway: Gateway, tmp_path: Path) -> None:
    async def delta() -> str:
        return (await gateway.post({"messages": MESSAGES}))[1]["x-dps-delta-tokens"]

    whole, repeated = await delta(), await delta()
    gateway.runtime.keys = load_keys(tmp_path, "team-a:sk-new\nteam-a:sk-alpha\n")
    assert (repeated, await delta()) == ("0", whole)
