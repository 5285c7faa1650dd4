"""The names of models: those that requests may use, and those that /v1/models lists. This module performs no I/O.

SGLang and vLLM list a LoRA adapter by its own name, with the model's name as its `parent`. In requests, SGLang expects
`MODEL:ADAPTER`, and answers requests for the adapter's own name with the base model. vLLM expects the adapter's own
name.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from dps_gateway.api.body import Body
from dps_gateway.api.errors import Problem, Refused
from dps_gateway.config import Model

PATH: Final = "/v1/models"

_VLLM: Final = "vllm"
"""The owner that vLLM states for its models."""

_SERVED: Final = "default"
"""SGLang's name for the model that it serves, which its clients may send."""


def resolve_model(model: Model, body: Body) -> Body:
    """A request with its alias replaced. Raises Refused.

    A request without the field `model` is for the served model. In SGLang, the name `MODEL:ADAPTER` selects a LoRA
    adapter.
    """
    asked = body.fields.get("model")
    if not asked or (name := served_name(model, asked)) == asked:
        return body
    return body.with_fields({"model": name})


def served_name(model: Model, asked: Any) -> Any:
    """The name by which an engine selects the model that a client has `asked` for. Raises Refused."""
    name = asked
    if isinstance(asked, str):
        aliases = {_SERVED: model.name} | model.aliases
        base, colon, adapter = asked.partition(":")
        if asked in aliases:
            name = aliases[asked]
        elif base in aliases:  # an adapter of an alias
            name = f"{aliases[base]}{colon}{adapter}"
    if not is_served(model, name):
        served = ", ".join([model.name, *sorted(model.aliases)])
        raise Refused(
            Problem.MODEL_NOT_FOUND, f"the model '{asked}' is not served; the served models are {served}"
        )
    return name


def is_served(model: Model, name: Any) -> bool:
    """Whether requests may use this name; aliases must already be resolved."""
    if not model.strict:
        return True
    return isinstance(name, str) and (name == model.name or name.startswith(f"{model.name}:"))


def requested_model(path: str) -> str | None:
    """The name in the path /v1/models/NAME, which is not percent-encoded, or None for other paths."""
    root, separator, name = path.partition(f"{PATH}/")
    return name or None if separator and not root else None


def model_list(model: Model, contents: Sequence[bytes], permitted: Callable[[str], bool]) -> bytes:
    """The list for a client: what all engines list, with names that requests may use, and the aliases.

    `contents` are the lists of at least one engine. `permitted` returns whether the client's API key may use the model
    of this name. Raises ValueError if one of `contents` is not a list of models.
    """
    listing, cards = _common(model, contents)
    cards |= {alias: cards[name] | {"id": alias} for alias, name in model.aliases.items() if name in cards}
    data = [card for name, card in cards.items() if permitted(model.aliases.get(name, name))]
    return orjson.dumps(listing | {"data": data})


def model_card(
    model: Model, contents: Sequence[bytes], asked: str, name: str, permitted: Callable[[str], bool]
) -> bytes:
    """The entry for the model that a client has `asked` for, and whose name in requests is `name`.

    `contents` and `permitted` are described at `model_list`. Raises Refused if one of the engines does not list
    the model, and ValueError if one of `contents` is not a list of models.
    """
    _, cards = _common(model, contents)
    if name not in cards:
        served = ", ".join(filter(permitted, cards))
        raise Refused(
            Problem.MODEL_NOT_FOUND, f"the model '{asked}' is not served; the served models are {served}"
        )
    return orjson.dumps(cards[name] | {"id": asked})


def _common(model: Model, contents: Sequence[bytes]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The first engine's list, and those of its entries that all engines have. See `_read`."""
    (listing, cards), *others = [_read(model, content) for content in contents]
    return listing, {name: card for name, card in cards.items() if all(name in each for _, each in others)}


def _read(model: Model, content: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """An engine's list, and its entries by their names in requests. Raises ValueError."""
    listing = orjson.loads(content)
    entries = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(each, dict) and isinstance(each.get("id"), str) for each in entries
    ):
        raise ValueError("the engine's answer is not a list of models")
    cards = {}
    base = next((each for each in entries if not each.get("parent")), None)
    if base is not None:  # the engine may serve the model under another name
        cards[model.name] = base | {"id": model.name}
    for entry in entries:
        adapter = bool(entry.get("parent")) and entry.get("owned_by") != _VLLM
        name = f"{model.name}:{entry['id']}" if adapter else entry["id"]
        if is_served(model, name):
            cards.setdefault(name, entry | {"id": name})
    return listing, cards
