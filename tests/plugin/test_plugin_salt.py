"""The hook that takes the cache salt of a request from its header."""

from types import SimpleNamespace
from typing import Any

import pytest

from dps_sglang.cache_salt import SALT_HEADER, salted


def convert(_serving: Any, request: Any, raw_request: Any) -> tuple[str | None, Any]:
    """Like SGLang's conversion: returns the salt with which the engine would look up the prompt."""
    return request.cache_salt, raw_request


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
    raw = SimpleNamespace(headers=headers)
    assert salted(convert, None, SimpleNamespace(cache_salt=field), raw) == (expected, raw)


def test_request_without_an_http_request_is_unchanged() -> None:
    assert salted(convert, None, SimpleNamespace(cache_salt=None)) == (None, None)
