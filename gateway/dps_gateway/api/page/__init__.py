"""The page on the admin port: its files, a stream of states and decisions, a search, and a simulation of alternatives.

It reads, and changes nothing.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import orjson
from aiohttp import hdrs, web

from dps_gateway.api.call import RUNTIME
from dps_gateway.api.page.simulation import WhatIfError, simulate
from dps_gateway.api.state import state_document
from dps_gateway.telemetry.recent import Record

STREAM_SECONDS: Final = 0.5
"""Time between two events of a stream."""

MAX_RECORDS_PER_EVENT: Final = 1000
"""Maximum number of records in an event. If more requests end within STREAM_SECONDS, only the newest are sent."""

_FILES: Final = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "views.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    hdrs.CACHE_CONTROL: "no-cache",
}
_CONTENT: Final = {name: (Path(__file__).parent / name).read_bytes() for name in _FILES}


async def page_file(request: web.Request) -> web.Response:
    """A file of the page; index.html for `/`."""
    name = request.match_info.get("name", "index.html")
    if name not in _FILES:
        raise web.HTTPNotFound
    gateways = f"http://{request.url.host}:*"  # those that `?gateways=` may name
    policy = (
        f"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self' {gateways}; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {**_HEADERS, "Content-Security-Policy": policy}
    return web.Response(body=_CONTENT[name], content_type=_FILES[name], charset="utf-8", headers=headers)


async def live(request: web.Request) -> web.StreamResponse:
    """A stream of server-sent events, until the client disconnects: `state`, and `decisions` with new records.

    The id of an event is the number of the newest record that the client has. A client that connects first receives
    the newest records, and one that connects again those that it has missed.
    """
    runtime = request.app[RUNTIME]
    recent = runtime.recent
    last = request.headers.get("Last-Event-ID", "")
    # After a restart of the gateway, the client may know a higher number than there are records.
    seen = int(last) if last.isdecimal() and int(last) <= recent.added else 0
    response = web.StreamResponse(
        headers={
            hdrs.CONTENT_TYPE: "text/event-stream",
            hdrs.CACHE_CONTROL: "no-store",
            **_cors_headers(request),
        }
    )
    await response.prepare(request)
    with suppress(ConnectionResetError):
        while True:
            records, seen = recent.after(seen, MAX_RECORDS_PER_EVENT), recent.added
            state = orjson.dumps(state_document(runtime))
            event = b"event: state\ndata: " + state + b"\n\n"
            if records:
                event += b"event: decisions\nid: %d\ndata: %b\n\n" % (seen, _array(records))
            await response.write(event)
            await asyncio.sleep(STREAM_SECONDS)
    return response


async def records(request: web.Request) -> web.Response:
    """The records of `?session=ID` that are still in memory, oldest first."""
    found = request.app[RUNTIME].recent.of(request.query.get("session", ""))
    return web.Response(body=_array(found), content_type="application/json", headers=_cors_headers(request))


def _cors_headers(request: web.Request) -> dict[str, str]:
    """The headers (CORS) that let the page of another gateway read this one, at another port of the same host name."""
    origin = request.headers.get(hdrs.ORIGIN, "")
    scheme, _, host = origin.partition("://")
    if scheme != "http" or host.rpartition(":")[0] != request.host.rpartition(":")[0]:
        return {}
    return {
        hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: origin,
        hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS: "true",
        hdrs.VARY: hdrs.ORIGIN,
    }


async def what_if(request: web.Request) -> web.Response:
    """Simulate the decisions in memory with the policy, threshold and fleet of the JSON object in the request.

    Another site cannot send it from a browser, because JSON as content type requires the permission of this server.
    """
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType
    try:
        result, status = await simulate(request.app[RUNTIME], orjson.loads(await request.read())), 200
    except (WhatIfError, orjson.JSONDecodeError) as error:
        result, status = {"error": str(error)}, 422
    return web.Response(body=orjson.dumps(result), status=status, content_type="application/json")


def _array(records: Sequence[Record]) -> bytes:
    return orjson.dumps([record.document() for record in records])
