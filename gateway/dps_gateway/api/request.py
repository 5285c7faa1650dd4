"""What a request is: the routed endpoints, the prompts and bytes of their requests. Pure but for reading the body."""

import uuid
from dataclasses import dataclass
from typing import Any, Final

import orjson
from aiohttp import web

from dps_gateway.api.errors import BadRequest, BodyTooLarge
from dps_gateway.api.usage import Dialect
from dps_gateway.runtime import Runtime

RUNTIME: Final = web.AppKey("runtime", Runtime)

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/generate"

_ASK_FOR_USAGE: Final = b'"stream_options":{"include_usage":true},'


@dataclass(frozen=True, slots=True)
class Route:
    """A routed endpoint: what OpenTelemetry calls its operation, and how its answers speak of usage."""

    path: str
    operation: str
    dialect: Dialect


def prompts_of(path: str, body: dict[str, Any]) -> list[Any] | None:
    """The prompts of a request, each a string or a list of token ids; None for a chat."""
    if path == CHAT:
        return None
    given = body.get("prompt")
    if path == GENERATE:
        given = body["text"] if body.get("text") is not None else body.get("input_ids")
    return given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]


ROUTES: Final = (
    Route(CHAT, "chat", "openai"),
    Route(COMPLETIONS, "text_completion", "openai"),
    Route(GENERATE, "text_completion", "native"),
)


def with_usage_asked(route: Route, body: dict[str, Any], raw: bytes) -> tuple[bytes, bool]:
    """(the request's bytes, whether the gateway has asked for a stream's usage where the client has not)."""
    if route.dialect != "openai" or body.get("stream") is not True:
        return raw, False
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        return raw, False
    if "stream_options" in body:
        wanted = (options if isinstance(options, dict) else {}) | {"include_usage": True}
        return orjson.dumps(body | {"stream_options": wanted}), True
    start = raw.index(b"{") + 1
    return raw[:start] + _ASK_FOR_USAGE + raw[start:], True


def max_output_tokens(body: dict[str, Any]) -> int | None:
    """The bound that the client sets on the answer, in tokens."""
    sampling = body.get("sampling_params")
    nested = sampling.get("max_new_tokens") if isinstance(sampling, dict) else None
    value = body.get("max_completion_tokens") or body.get("max_tokens") or nested
    return value if isinstance(value, int) else None


def request_id_of(request: web.Request) -> str:
    """The client's id for its request, or a new one."""
    return request.headers.get("x-request-id") or uuid.uuid4().hex


async def read_body(request: web.Request) -> bytes:
    """The request's bytes. Raises BodyTooLarge."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        limit = request.app[RUNTIME].config.limits.max_body_bytes
        raise BodyTooLarge(f"the request is larger than {limit} bytes (limits.maxBodyBytes)") from error


def parse_object(raw: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises BadRequest."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body
