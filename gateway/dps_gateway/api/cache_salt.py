"""Setting the tenant's cache salt in a request to an engine."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from dps_gateway.api.errors import BadRequest
from dps_gateway.prompt.separation import CacheSalt

SALT_HEADER: Final = "x-dps-cache-salt"
"""Carries the salt of a request that has no field for it. Only engines with the plugin dps_sglang read the header."""


def with_salt(
    raw: bytes, body: Mapping[str, Any], fields: Iterable[str], salt: CacheSalt
) -> tuple[bytes, dict[str, Any]]:
    """The request with the tenant's salt in each of `fields`, serialized and parsed.

    A client's own value selects one of the tenant's caches, never another tenant's: its digest replaces it. Raises
    BadRequest if the value is neither a string nor a list of strings, or the request cannot be serialized.
    """
    salts = {field: _salts(field, body.get(field), salt) for field in fields}
    salted = {**body, **salts}
    if not salts:
        return raw, salted
    if body and not salts.keys() & body.keys():  # then the client's bytes can be kept
        start = raw.index(b"{") + 1
        return raw[:start] + orjson.dumps(salts)[1:-1] + b"," + raw[start:], salted
    try:
        return orjson.dumps(salted), salted
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"the request with {' and '.join(salts)} cannot be serialized: {error}") from error


def _salts(field: str, value: Any, salt: CacheSalt) -> str | list[str]:
    """The salt, or one for each prompt of a batch if the client sent a list."""
    if value is None or isinstance(value, str):
        return salt.of(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [salt.of(item) for item in value]
    raise BadRequest(f"{field} must be a string, or a list of one string for each prompt")
