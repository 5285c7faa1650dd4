"""The tenant's cache salt in a request to an engine."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from dps_gateway.api.errors import BadRequest
from dps_gateway.prompt.cache_identity import CacheSalt

SALT_HEADER: Final = "x-dps-cache-salt"
"""Carries the salt of a request that has no field for it. Only engines with the plugin dps_sglang read the header."""


def salted_fields(
    body: Mapping[str, Any], fields: Iterable[str], salt: CacheSalt
) -> dict[str, str | list[str]]:
    """The values of `fields` with the tenant's salt.

    A client's own value selects one of the tenant's caches, never another tenant's: its digest replaces it. Raises
    BadRequest if the value is neither a string nor a list of strings.
    """
    return {field: _salts(field, body.get(field), salt) for field in fields}


def _salts(field: str, value: Any, salt: CacheSalt) -> str | list[str]:
    """The salt, or one for each prompt of a batch if the client sent a list."""
    if value is None or isinstance(value, str):
        return salt.of(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [salt.of(item) for item in value]
    raise BadRequest(f"{field} must be a string, or a list of one string for each prompt")
