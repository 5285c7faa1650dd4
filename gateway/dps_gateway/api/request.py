"""Reading a client's request: its id, its body, its JSON object."""

import uuid
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

from dps_gateway.api.errors import BadRequest, BodyTooLarge

MAX_REQUEST_ID_CHARS: Final = 255


def request_id_of(request: web.Request) -> str:
    """The client's x-request-id, or a new id if it sends none that is usable in a header and a log line."""
    sent = request.headers.get("x-request-id", "")
    usable = 0 < len(sent) <= MAX_REQUEST_ID_CHARS and sent.isascii() and sent.isprintable()
    return sent if usable else uuid.uuid4().hex


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """The body of the request, decompressed. Raises BodyTooLarge if it exceeds `max_bytes` (limits.maxBodyBytes)."""
    too_large = BodyTooLarge(f"the request is larger than {max_bytes} bytes (limits.maxBodyBytes)")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    chunks, size = [], 0
    try:
        while chunk := await request.content.readany():
            size += len(chunk)
            if size > max_bytes:
                raise too_large
            chunks.append(chunk)
    except (web.RequestPayloadError, aiohttp.ClientPayloadError) as error:
        raise BadRequest("the request body is incomplete or cannot be decompressed") from error
    return b"".join(chunks)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises BadRequest if the body is anything else."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body
