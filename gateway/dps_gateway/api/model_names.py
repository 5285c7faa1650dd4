"""The model that a request names: aliases, adapters, and models that are not served. This module performs no I/O."""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from dps_gateway.api.errors import BadRequest, ModelNotFound
from dps_gateway.config import Model

_SERVED: Final = "default"
"""SGLang's name for the model that it serves, which its clients may send."""


def resolve_model(model: Model, raw: bytes, body: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """A request with its alias replaced, as sent and parsed. Raises ModelNotFound and BadRequest.

    A request without the field `model` is for the served model. In SGLang, the name `MODEL:ADAPTER` selects a LoRA
    adapter.
    """
    if not body.get("model"):
        return raw, body
    asked = body["model"]
    name = served_name(model, asked)
    if name == asked:
        return raw, body
    body = body | {"model": name}
    try:
        return orjson.dumps(body), body
    except orjson.JSONEncodeError as error:
        raise BadRequest(f"the request with the model '{name}' cannot be serialized: {error}") from error


def served_name(model: Model, asked: Any) -> Any:
    """The name by which an engine selects the model that a client has `asked` for. Raises ModelNotFound."""
    name = _target({_SERVED: model.name} | model.aliases, asked) if isinstance(asked, str) else asked
    if not is_served(model, name):
        served = ", ".join([model.name, *sorted(model.aliases)])
        raise ModelNotFound(f"the model '{asked}' is not served; the served models are {served}")
    return name


def is_served(model: Model, name: Any) -> bool:
    """Whether requests may use this name; aliases must already be resolved."""
    if not model.strict:
        return True
    return isinstance(name, str) and (name == model.name or name.startswith(f"{model.name}:"))


def _target(aliases: Mapping[str, str], asked: str) -> str:
    """The name for an alias, or for an adapter of an alias."""
    if asked in aliases:
        return aliases[asked]
    base, colon, adapter = asked.partition(":")
    return f"{aliases[base]}{colon}{adapter}" if base in aliases else asked
