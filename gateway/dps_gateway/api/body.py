"""The JSON bodies of requests: parses them, resolves the model that they name, and encodes them for the engine."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, Self, TypeVar

import orjson

from dps_gateway.api.errors import BadRequest, Problem, Refused
from dps_gateway.config import Model

MAX_VALUES: Final = 2_000_000
"""Approximate maximum number of values in a JSON body, among them token ids. A value that takes three bytes in the body
can take a hundred in memory, and parsing blocks the event loop."""

LONG_BODY_BYTES: Final = 256 * 1024
"""Rendering the chat of a body of this size can take more than 10 ms."""

_SERVED: Final = "default"
"""SGLang's name for the model that it serves, which its clients may send."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Body:
    """The JSON object of a request: `fields`, and the bytes to send, which are made from the client's when needed."""

    client: bytes
    """The body that the client sent."""
    fields: dict[str, Any]
    """The object, parsed."""
    _added: Mapping[str, Any] = field(default_factory=dict)
    """The fields that `client` lacks."""
    _replaced: tuple[str, ...] = ()
    """The fields that have other values in `client`."""

    @classmethod
    def parse(cls, client: bytes) -> Self:
        """Raises BadRequest if the body is no JSON object, or has more than MAX_VALUES values."""
        if len(client) > MAX_VALUES and sum(map(client.count, (b",", b"{", b"["))) > MAX_VALUES:
            raise BadRequest(f"the body has more than {MAX_VALUES} values")
        try:
            fields = orjson.loads(client)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise BadRequest("the body must be a JSON object")
        return cls(client, fields)

    def with_fields(self, fields: Mapping[str, Any]) -> Self:
        """The same object with other values of these fields."""
        replaced = tuple(name for name in fields if name in self.fields or not self.fields)
        return type(self)(
            self.client, {**self.fields, **fields}, {**self._added, **fields}, self._replaced + replaced
        )

    def encode(self) -> bytes:
        """The bytes to send. Those of the client are kept unless a field of theirs has been replaced.

        Raises BadRequest if the object cannot be serialized.
        """
        if self._replaced:
            try:
                return orjson.dumps(self.fields)
            except orjson.JSONEncodeError as error:
                # The object is nested too deeply for the encoder, but not for the decoder.
                names = " and ".join(self._replaced)
                raise BadRequest(f"the request cannot be serialized with another {names}: {error}") from error
        if not self._added:
            return self.client
        start = self.client.index(b"{") + 1
        return self.client[:start] + orjson.dumps(self._added)[1:-1] + b"," + self.client[start:]


async def in_thread_if_large(body: bytes, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work` on a body, which is done in a thread if the body is long.

    Parsing and serializing JSON hold Python's interpreter lock, so other requests wait for each of these steps, but are
    served between them.
    """
    if len(body) < LONG_BODY_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


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
