"""An engine's answer as the gateway's response: its headers, and its errors as error objects of the endpoint."""

from typing import Final
from urllib.parse import urlsplit, urlunsplit

from aiohttp import hdrs, web
from multidict import CIMultiDict

from dps_gateway.api.call import Call
from dps_gateway.upstream.exchange import Answer

MAX_ERROR_BYTES: Final = 1024 * 1024
"""Error bodies longer than this are relayed unchanged."""

PART_BYTES: Final = 256 * 1024
"""Longer bodies are sent in parts of this size, because the time for each write is limited."""


def client_headers(answer: Answer) -> CIMultiDict[str]:
    """The headers of an answer for the client. In redirects, the engine's internal address is removed from Location."""
    headers = answer.headers()
    if hdrs.LOCATION in headers:
        parts = urlsplit(headers[hdrs.LOCATION])
        headers[hdrs.LOCATION] = urlunsplit(("", "", parts.path or "/", parts.query, parts.fragment))
    return headers


async def send_complete(call: Call, answer: Answer, content: bytes) -> web.StreamResponse:
    """Send an answer whose body is complete. An engine's error becomes an error object of the endpoint.

    Unlike those of a stream, the headers are sent together with the body, unless it is long.
    """
    headers = client_headers(answer)
    if answer.status >= 400 and len(content) <= MAX_ERROR_BYTES:
        content = call.errors.of_engine(answer.status, content)
        headers[hdrs.CONTENT_TYPE] = "application/json"
    if len(content) > PART_BYTES:
        return await _send_in_parts(call, answer.status, headers, content)
    response = web.Response(status=answer.status, headers=headers, body=content)
    await call.start(response)
    await call.finish()
    return response


async def _send_in_parts(
    call: Call, status: int, headers: CIMultiDict[str], content: bytes
) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers=headers)
    response.content_length = len(content)
    await call.start(response)
    for start in range(0, len(content), PART_BYTES):
        await call.write(content[start : start + PART_BYTES])
    await call.finish()
    return response
