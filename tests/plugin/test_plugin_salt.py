"""The hook that takes the cache salt of a request from its header."""

from types import SimpleNamespace
from typing import Any

import pytest

from dps_sglang.cache_salt import RUST_SERVER, SALT_HEADER, announced, salted


def generate(_manager: Any, obj: Any, request: Any) -> tuple[str | None, Any]:
    """Like SGLang's method: returns the salt with which the engine would look up the prompt."""
    return obj.cache_salt, request


@pytest.mark.parametrize(
    ("field", "headers", "expected"),
    [
        pytest.param(None, {SALT_HEADER: "header"}, "header", id="header-only"),
        pytest.param("field", {SALT_HEADER: "header"}, "field", id="the-field-wins"),
        pytest.param("field", {}, "field", id="field-only"),
        pytest.param(None, {}, None, id="neither"),
    ],
)
def test_salt_of_a_request(field: str | None, headers: dict[str, str], expected: str | None) -> None:
    request = SimpleNamespace(headers=headers)
    assert salted(generate, None, SimpleNamespace(cache_salt=field), request) == (expected, request)


def test_request_without_an_http_request_is_unchanged() -> None:
    assert salted(generate, None, SimpleNamespace(cache_salt=None)) == (None, None)


def test_request_for_an_embedding_has_no_salt() -> None:
    request = SimpleNamespace(headers={SALT_HEADER: "header"})
    unchanged = SimpleNamespace()
    assert salted(lambda _manager, obj, request: vars(obj), None, unchanged, request) == {}


@pytest.mark.parametrize(
    ("workers", "rust", "expected"),
    [
        pytest.param(1, None, SALT_HEADER, id="the process with the plugin serves HTTP"),
        pytest.param(1, "false", SALT_HEADER, id="server in Rust disabled"),
        pytest.param(2, None, None, id="other workers serve HTTP"),
        pytest.param(1, "1", None, id="server in Rust"),
    ],
)
def test_header_is_announced_only_if_the_process_that_serves_http_reads_it(
    monkeypatch: pytest.MonkeyPatch, workers: int, rust: str | None, expected: str | None
) -> None:
    monkeypatch.delenv(RUST_SERVER, raising=False)
    if rust is not None:
        monkeypatch.setenv(RUST_SERVER, rust)
    info = announced(lambda arguments: {"tokenizer_worker_num": arguments}, workers)
    assert info.get("dps_cache_salt_header") == expected
