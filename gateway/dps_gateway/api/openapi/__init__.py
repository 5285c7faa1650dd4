"""The OpenAPI description of the public port: paths.yaml and components.yaml, completed with the error responses."""

from functools import cache
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final

import orjson
import yaml

from dps_gateway.api.endpoints import errors_of
from dps_gateway.api.endpoints.messages import MESSAGES
from dps_gateway.api.errors import codes_by_status

METHODS: Final = frozenset({"get", "put", "post", "patch", "delete"})
_RETRIED: Final = frozenset({"429", "503"})
_OF_ENGINES: Final = {
    "4XX": "Another error of the engine in the request",
    "5XX": "Another error of the engine",
}
_DIALECTS: Final = ("OpenAIError", "AnthropicError")


@cache
def encoded(version: str) -> bytes:
    """The description as JSON. Reading it takes a fifth of a second the first time."""
    return orjson.dumps(description(version))


def description(version: str) -> dict[str, Any]:
    """The description of a gateway of this version."""
    document, components = (_read(name) for name in ("paths.yaml", "components.yaml"))
    document["info"]["version"] = version
    errors = {
        str(status): f"{HTTPStatus(status).phrase} ({', '.join(codes)})"
        for status, codes in codes_by_status().items()
    } | _OF_ENGINES
    components["responses"] = {
        f"{dialect}{status}": _error(dialect, status, text)
        for dialect in _DIALECTS
        for status, text in errors.items()
    }
    for path, item in document["paths"].items():
        dialect = "AnthropicError" if errors_of(path) is MESSAGES else "OpenAIError"
        references = {status: {"$ref": f"#/components/responses/{dialect}{status}"} for status in errors}
        for operation in (item[method] for method in METHODS & item.keys()):
            if operation.get("security") != []:  # the gateway answers the others itself
                operation["responses"] = operation["responses"] | references
    return document | {"components": components}


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((files(__package__) / name).read_text())
    return document


def _error(dialect: str, status: str, text: str) -> dict[str, Any]:
    headers = {"x-request-id": "RequestId"}
    if status == "401":
        headers["WWW-Authenticate"] = "WWWAuthenticate"
    if status in _RETRIED:
        headers["Retry-After"] = "RetryAfter"
    return {
        "description": text,
        "headers": {name: {"$ref": f"#/components/headers/{header}"} for name, header in headers.items()},
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{dialect}"}}},
    }
