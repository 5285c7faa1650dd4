"""Reading a client's request: its id, its body, its JSON object."""

import asyncio
import os
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import orjson
from aiohttp import web

from dps_gateway.api.errors import BadRequest, BodyTooLarge, BodyTooSlow
from dps_gateway.auth import URGENCIES, Key
from dps_gateway.config import GatewayConfig
from dps_gateway.upstream.fair_queue import DEFAULT_URGENCY

MAX_REQUEST_ID_CHARS: Final = 255

REQUEST_ID_BYTES: Final = 16

MAX_VALUES: Final = 2_000_000
"""Approximate maximum number of values in a JSON body, among them token ids. A value that takes three bytes in the body
can take a hundred in memory, and parsing blocks the event loop."""

TIMEOUT_HEADER: Final = "x-envoy-upstream-rq-timeout-ms"
"""Limits the duration of a request including its retries, as in Envoy."""

MAX_TIMEOUT_DIGITS: Final = 12
"""Longer numbers are cut off; timeouts.totalSeconds is shorter in any case."""


def request_id_of(request: web.BaseRequest) -> str:
    """The client's x-request-id, or a new id if it sends none that is usable in a header and a log line."""
    sent = request.headers.get("x-request-id", "")
    usable = 0 < len(sent) <= MAX_REQUEST_ID_CHARS and sent.isascii() and sent.isprintable()
    return sent if usable else os.urandom(REQUEST_ID_BYTES).hex()


def timeout_seconds_of(request: web.Request) -> float | None:
    """The time that the client allows for the whole request, in seconds, or None. Raises BadRequest.

    Envoy's header is in milliseconds, and 0 means no limit.
    """
    sent = request.headers.get(TIMEOUT_HEADER)
    if sent is None:
        return None
    if not sent.isascii() or not sent.isdecimal():
        raise BadRequest(f"{TIMEOUT_HEADER} must be a number of milliseconds")
    return int(sent[:MAX_TIMEOUT_DIGITS]) / 1000 or None


def urgency_of(request: web.Request, key: Key | None) -> int:
    """The urgency in the queue: that of the Priority header (RFC 9218), as far as the API key permits it.

    Without a key, or with one that has no `urgency`, a client can only lower its priority. As the RFC demands, values
    that are not valid are ignored.
    """
    asked = DEFAULT_URGENCY
    for member in ",".join(request.headers.getall("Priority", ())).split(","):
        name, _, value = member.strip().partition("=")
        value = value.partition(";")[0].strip()
        if name == "u" and value in URGENCIES:
            asked = int(value)
    permitted = DEFAULT_URGENCY if key is None or key.urgency is None else key.urgency
    return max(asked, permitted)


async def read_body(
    request: web.Request, config: GatewayConfig, reserve: Callable[[int], None] = lambda size: None
) -> bytes:
    """The body of the request, decompressed. `reserve` is called with the size of each part before it is kept.

    Raises BodyTooLarge if it exceeds limits.maxBodyBytes, and BodyTooSlow if it takes longer than timeouts.bodySeconds
    or, after timeouts.headerSeconds, arrives at less than limits.minBodyBytesPerSecond on average.
    """
    limits, timeouts = config.limits, config.timeouts
    if request.content.is_eof():  # most bodies have arrived with the head and need no timer
        return await _read(request, limits.max_body_bytes, reserve)
    began = asyncio.get_running_loop().time()
    rate = limits.min_body_bytes_per_second

    def ends(size: int) -> float:
        seconds = timeouts.header_seconds + size / rate if rate else timeouts.body_seconds
        return began + min(timeouts.body_seconds, seconds)

    try:
        async with asyncio.timeout_at(ends(0)) as limit:
            return await _read(
                request, limits.max_body_bytes, reserve, lambda size: limit.reschedule(ends(size))
            )
    except TimeoutError as error:
        seconds = asyncio.get_running_loop().time() - began
        raise BodyTooSlow(
            f"the body was incomplete after {seconds:.3g} s (timeouts.bodySeconds or limits.minBodyBytesPerSecond)"
        ) from error


async def _read(
    request: web.Request,
    max_bytes: int,
    reserve: Callable[[int], None],
    arrived: Callable[[int], None] = lambda size: None,
) -> bytes:
    """The body. `arrived` is called with the size that has arrived so far."""
    too_large = BodyTooLarge(f"the request is larger than {max_bytes} bytes (limits.maxBodyBytes)")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    chunks, size = [], 0
    try:
        while chunk := await request.content.readany():
            size += len(chunk)
            if size > max_bytes:
                raise too_large
            reserve(len(chunk))
            chunks.append(chunk)
            arrived(size)
    except (web.RequestPayloadError, aiohttp.ClientPayloadError) as error:
        raise BadRequest("the request body is incomplete or cannot be decompressed") from error
    return b"".join(chunks)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises BadRequest if the body is anything else, or has more than MAX_VALUES values."""
    if len(raw) > MAX_VALUES and sum(map(raw.count, (b",", b"{", b"["))) > MAX_VALUES:
        raise BadRequest(f"the body has more than {MAX_VALUES} values")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body
