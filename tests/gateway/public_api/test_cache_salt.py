"""Cache salts: each tenant has its own KV cache in the engines, whatever salt its requests carry."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.api.body import Body
from dps_gateway.api.errors import BadRequest
from dps_gateway.api.inference import salted_fields
from dps_gateway.auth import Keys
from dps_gateway.pool import Pool
from dps_gateway.prompt.prefixes import CacheSalt
from dps_gateway.upstream.exchange import SALT_HEADER
from dps_gateway.upstream.replica import UNKNOWN, Configuration
from dps_testkit.in_process_gateway import CHAT, InProcessGateway, ScriptedEngine

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
def test_salt_is_added_to_the_request(body: dict[str, Any], expected: dict[str, Any]) -> None:
    salted = salted_body(json.dumps(body).encode(), "cache_salt")
    assert (json.loads(salted.encode()), salted.fields) == (expected, expected)


def salted_body(raw: bytes, *fields: str) -> Body:
    body = Body.parse(raw)
    return body.with_fields(salted_fields(body.fields, fields, SALT))


def test_bytes_of_a_request_without_salt_are_kept() -> None:
    own = SALT.of(None)
    assert salted_body(
        b' { "seed": 1e2, "n": 1 }', *BOTH
    ).encode() == b' {"cache_salt":"%b","extra_key":"%b", "seed": 1e2, "n": 1 }' % ((own.encode(),) * 2)


def test_salt_that_the_client_sent_twice_is_replaced() -> None:
    raw = b'{"cache_salt": "x", "cache_\\u0073alt": "y"}'
    assert salted_body(raw, "cache_salt").encode() == b'{"cache_salt":"%b"}' % SALT.of("y").encode()


@pytest.mark.parametrize("value", [1, True, {"a": 1}, [1], ["x", None], [["x"]]])
def test_salt_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(BadRequest, match="cache_salt must be a string, or a list of one string"):
        salted_fields({"cache_salt": value}, ("cache_salt",), SALT)


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


class SaltedGateway:
    """A gateway with two tenants, whose engine reads the header with the salt."""

    def __init__(self, gateway: InProcessGateway, engine: ScriptedEngine) -> None:
        self.runtime = gateway.runtime
        self._gateway = gateway
        self._engine = engine

    @property
    def received(self) -> list[bytes]:
        """The bodies that the engine has received."""
        return [body for _, _, body in self._engine.requests]

    @property
    def salts(self) -> list[str | None]:
        """The headers with salts that the engine has received."""
        return [headers.get(SALT_HEADER.lower()) for _, headers, _ in self._engine.requests]

    async def post(
        self, body: Any, key: str = "sk-alpha", path: str = CHAT, own_header: str = ""
    ) -> tuple[int, dict[str, str]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"} | ({SALT_HEADER: own_header} if own_header else {})
        response, _ = await self._gateway.post(path, data=data, headers=headers)
        return response.status, dict(response.headers)

    async def sent(self, body: Any, key: str = "sk-alpha", path: str = CHAT) -> Any:
        """The body that the engine receives for this request."""
        assert (await self.post(body, key, path))[0] == 200
        return json.loads(self.received[-1])


@pytest.fixture
def salted(gateway: InProcessGateway, engine: ScriptedEngine, tmp_path: Path) -> SaltedGateway:
    gateway.runtime.keys = load_keys(tmp_path, KEYS)
    for engines in gateway.runtime.pools.values():
        for replica in engines.replicas.values():
            replica.configuration = Configuration(salt_header=SALT_HEADER)
    return SaltedGateway(gateway, engine)


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
    salted: SaltedGateway, path: str, body: dict[str, Any], fields: tuple[str, ...]
) -> None:
    alpha = await salted.sent(body, "sk-alpha", path)
    beta = await salted.sent(body, "sk-beta", path)
    again = await salted.sent(body, "sk-alpha", path)
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
    salted: SaltedGateway, path: str
) -> None:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    for key in ("sk-alpha", "sk-beta", "sk-alpha"):
        await salted.post(body, key, path)
    alpha, beta, again = salted.salts
    assert alpha == again
    assert None not in {alpha, beta}
    assert alpha != beta
    assert [json.loads(sent) for sent in salted.received] == [body] * 3


@pytest.mark.parametrize("path", WITHOUT_A_FIELD)
@pytest.mark.parametrize("configuration", [None, UNKNOWN], ids=["unknown", "without the plugin"])
async def test_requests_whose_salt_no_engine_reads_are_refused(
    salted: SaltedGateway, configuration: Configuration | None, path: str
) -> None:
    for pool in salted.runtime.pools.values():
        for replica in pool.replicas.values():
            replica.configuration = configuration
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    assert (await salted.post(body, path=path))[0] == 503
    assert salted.received == []
    assert (await salted.post(body))[0] == 200
    assert (await salted.post(body, path="/v1/embeddings"))[0] == 200


async def test_requests_whose_salt_is_in_a_header_are_sent_to_an_engine_that_reads_it(
    salted: SaltedGateway,
) -> None:
    greedy = salted.runtime.pools[Pool.GREEDY]
    greedy.set_endpoints(["http://127.0.0.1:9", *greedy.replicas])  # nothing listens there
    salted.runtime.pools[Pool.SPECULATIVE].set_endpoints([])
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    for number in range(6):
        assert (await salted.post(body | {"metadata": {"user_id": f"{number}"}}, path="/v1/messages"))[
            0
        ] == 200


async def test_single_tenant_needs_no_engine_that_reads_its_salt(
    salted: SaltedGateway, tmp_path: Path
) -> None:
    salted.runtime.keys = load_keys(tmp_path, "alpha:sk-alpha\n")
    for pool in salted.runtime.pools.values():
        for replica in pool.replicas.values():
            replica.configuration = UNKNOWN
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    assert (await salted.post(body, path="/v1/messages"))[0] == 200


@pytest.mark.parametrize("path", ["/v1/messages", CHAT, "/v1/embeddings"])
async def test_clients_cannot_choose_the_salt_header(salted: SaltedGateway, path: str) -> None:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    await salted.post(body, path=path)
    await salted.post(body, path=path, own_header="that of another tenant")
    own, forged = salted.salts
    assert own == forged


@pytest.mark.parametrize("body", [b'{"input": NaN}', b"[]", b"{"])
async def test_body_that_cannot_carry_a_salt_is_not_relayed(salted: SaltedGateway, body: bytes) -> None:
    assert (await salted.post(body, path="/v1/responses"))[0] == 400
    assert salted.received == []


async def test_forwarded_bytes_are_the_clients_without_tenants_or_isolation(salted: SaltedGateway) -> None:
    raw = b'{ "messages": [{"role": "user", "content": "hello"}], "cache_salt": ["any", 1] }'
    salted.runtime.config = salted.runtime.config.model_copy(
        update={"auth": salted.runtime.config.auth.model_copy(update={"isolate_cache": False})}
    )
    await salted.post(raw)
    salted.runtime.keys = None
    await salted.post(raw)
    await salted.post(raw, path="/v1/responses")
    assert salted.received == [raw] * 3
