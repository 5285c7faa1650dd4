"""Session identity: the order of the sources of ids, and the opaque ids derived from them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from dps_gateway.session.identity import (
    DEFAULT_SESSION_KEYS,
    Scope,
    SessionId,
    client_session_id,
    parse_session_key,
)

KEYS = tuple(map(parse_session_key, DEFAULT_SESSION_KEYS))
SCOPE = Scope.of("model", "tenant")


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        pytest.param({}, {}, None, id="nothing"),
        pytest.param({"X-Session-Id": "a"}, {"prompt_cache_key": "b"}, "a", id="a header before the body"),
        pytest.param({"session_id": "codex"}, {}, "codex", id="Codex"),
        pytest.param({"x-claude-code-session-id": "cc"}, {}, "cc", id="Claude Code"),
        pytest.param({"x-opencode-session": "oc"}, {}, "oc", id="OpenCode"),
        pytest.param({"x-litellm-session-id": "ll"}, {}, "ll", id="LiteLLM"),
        pytest.param({}, {"prompt_cache_key": "k"}, "k", id="prompt_cache_key"),
        pytest.param({}, {"conversation": "conv"}, "conv", id="conversation as text"),
        pytest.param({}, {"conversation": {"id": "conv"}}, "conv", id="conversation as an object"),
        pytest.param({}, {"metadata": {"session_id": "m"}}, "m", id="metadata.session_id"),
        pytest.param({"x-session-id": ""}, {"prompt_cache_key": "k"}, "k", id="an empty value is ignored"),
        pytest.param(
            {"x-session-id": "x" * 256}, {"prompt_cache_key": "k"}, "k", id="an overlong value is ignored"
        ),
        pytest.param(
            {"Authorization": "Bearer k", "X-Forwarded-For": "::1"},
            {"user": "u"},
            None,
            id="credentials, addresses and users are ignored",
        ),
    ],
)
def test_first_session_key_with_a_valid_value_is_used(
    headers: dict[str, str], body: dict[str, Any], expected: str | None
) -> None:
    assert client_session_id(KEYS, CIMultiDict(headers), body) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["x-session-id", "header:", "body:", "body:a..b", "cookie:x", ""],
            "write header:NAME or body:FIELD",
        ),
        (["header:authorization", "header:Cookie", "header:x-api-key"], "must not identify a session"),
    ],
)
def test_invalid_session_keys_and_credentials_are_rejected(texts: list[str], message: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=message):
            parse_session_key(text)


@given(client_id=st.text(min_size=1, max_size=80))
def test_client_id_is_hashed_and_the_opaque_id_is_stable(client_id: str) -> None:
    session = SessionId.of_client(SCOPE, client_id)
    assert SessionId.parse(session.text) == session
    assert SessionId.of_client(SCOPE, session.text) == session
    assert len(client_id) < 3 or client_id not in session.text


def test_tenants_models_and_routers_have_separate_sessions() -> None:
    scopes = [
        Scope.of("model", "a"),
        Scope.of("model", "b"),
        Scope.of("other", "a"),
        Scope.of("mode", "la"),
        Scope.of("model", "a", "serving/qwen"),
        Scope.of("model", "a", "serving/other"),
    ]
    assert len({SessionId.of_client(scope, "same").text for scope in scopes}) == len(scopes)


@pytest.mark.parametrize("text", ["", "dps-", "dps-xyz", "DPS-" + "0" * 32, "dps-" + "0" * 31, "0" * 36])
def test_malformed_opaque_id_is_not_parsed(text: str) -> None:
    assert SessionId.parse(text) is None
