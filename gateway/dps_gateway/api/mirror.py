"""The mirror's endpoints, through which gateway replicas and workers share cached session state during a Redis outage.

Replicas use them on the admin port. The workers of one replica share that port, so any of them may serve a request. It
then queries the others, each of which also serves the endpoints on its own Unix socket. Only processes of the same user
can reach the sockets, so they require no token.
"""

from typing import Final

import orjson
from aiohttp import web

from dps_gateway.api.admin_auth import for_peers
from dps_gateway.api.admin_json import json_response
from dps_gateway.api.call import RUNTIME
from dps_gateway.session.keys import is_valid_entry
from dps_gateway.session.peers import PATH
from dps_gateway.session.store import merged_values

MAX_BODY_BYTES: Final = 256 * 1024

_KEYS_EXPECTED: Final = "expected a JSON array of keys"

WHOLE_REPLICA: Final = web.AppKey("whole_replica", bool)
"""Whether the application answers for all workers of this gateway replica, or for its own process only."""


def add_mirror_routes(app: web.Application, *, whole_replica: bool) -> None:
    """Add the mirror's endpoints to an application."""
    app[WHOLE_REPLICA] = whole_replica
    for method, handler in (("POST", _read), ("PUT", _write), ("DELETE", _delete)):
        app.router.add_route(method, PATH, for_peers(handler) if whole_replica else handler)


async def _read(request: web.Request) -> web.Response:
    """The cached values of the requested keys, for a gateway that cannot reach Redis."""
    runtime = request.app[RUNTIME]
    keys = await _keys(request)
    if keys is None:
        return _error(_KEYS_EXPECTED)
    found = [runtime.mirror.values(keys)]
    if request.app[WHOLE_REPLICA] and runtime.workers is not None:
        found += await runtime.workers.values(keys)
    return json_response({key: value.decode() for key, value in merged_values(found).items()})


async def _write(request: web.Request) -> web.Response:
    """Accept the commits of a gateway that cannot reach Redis.

    They are written to Redis later, so only valid entries are accepted, and only for this gateway's model and tenants.
    """
    runtime = request.app[RUNTIME]
    try:
        entries = orjson.loads(await request.read())
    except ValueError:
        entries = None
    if not isinstance(entries, dict) or not all(isinstance(value, str) for value in entries.values()):
        return _error("expected a JSON object of keys and values")
    encoded = {key: value.encode() for key, value in entries.items()}
    scopes = runtime.scope_names()
    if not all(is_valid_entry(scopes, key, value) for key, value in encoded.items()):
        return _error("expected records and pointers of sessions of this gateway's model and tenants")
    runtime.turns.store.accept(encoded)
    if request.app[WHOLE_REPLICA] and runtime.workers is not None:
        await runtime.workers.publish(encoded)
    return web.Response(status=204)


async def _delete(request: web.Request) -> web.Response:
    """Remove the cached values of the requested keys, which belong to a session that is being deleted."""
    runtime = request.app[RUNTIME]
    keys = await _keys(request)
    if keys is None:
        return _error(_KEYS_EXPECTED)
    runtime.turns.store.forget(keys)
    if request.app[WHOLE_REPLICA] and runtime.workers is not None:
        await runtime.workers.forget(keys)
    return web.Response(status=204)


async def _keys(request: web.Request) -> list[str] | None:
    """The keys in the request's body; None if it is anything but a JSON array of strings."""
    try:
        keys = orjson.loads(await request.read())
    except ValueError:
        return None
    return keys if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else None


def _error(message: str) -> web.Response:
    return json_response({"error": message}, 400)
