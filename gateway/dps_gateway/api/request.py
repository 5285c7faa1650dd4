"""Reading a client's request: its id, its body, its JSON object."""

import uuid
from typing import Any

import orjson
from aiohttp import web

from dps_gateway.api.errors import BadRequest, BodyTooLarge


def request_id_of(request: web.Request) -> str:
    """The client's x-request-id, or a new id."""
    return request.headers.get("x-request-id") or uuid.uuid4().hex


async def read_body(request: web.Request) -> bytes:
    """The body of the request. Raises BodyTooLarge if it exceeds limits.maxBodyBytes."""
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        limit = request.client_max_size
        raise BodyTooLarge(f"the request is larger than {limit} bytes (limits.maxBodyBytes)") from error


def parse_object(raw: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises BadRequest if the body is anything else."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body
