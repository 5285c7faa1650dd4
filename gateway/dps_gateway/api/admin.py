"""The admin port: probes, metrics, and the state of this gateway replica.

Responses contain no prompts and no secrets.
"""

from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from aiohttp import web

from dps_gateway.api.admin_auth import protected
from dps_gateway.api.admin_json import json_response
from dps_gateway.api.call import RUNTIME
from dps_gateway.api.mirror import MAX_BODY_BYTES, add_mirror_routes
from dps_gateway.pool import Pool
from dps_gateway.runtime import Runtime
from dps_gateway.session.document import session_document
from dps_gateway.session.identity import SessionId
from dps_gateway.session.storage import StoreUnavailable
from dps_gateway.telemetry.metrics import CONTENT_TYPE


def admin_app(runtime: Runtime) -> web.Application:
    """The application of the admin port."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app[RUNTIME] = runtime
    app.router.add_get("/livez", _livez)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/pools", _pools)
    app.router.add_get("/config", _config)
    app.router.add_get("/decisions", protected(_decisions))
    app.router.add_get("/sessions/{id}", protected(_session))
    app.router.add_delete("/sessions/{id}", protected(_delete_session))
    add_mirror_routes(app, whole_replica=True)
    return app


def worker_app(runtime: Runtime) -> web.Application:
    """The application of a worker's own Unix socket, for the other workers of this gateway replica."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app[RUNTIME] = runtime
    add_mirror_routes(app, whole_replica=False)
    return app


def redacted(url: str | None) -> str | None:
    """A URL without its password and the values of its options, which may be passwords as well."""
    if url is None:
        return None
    parts = urlsplit(url)
    credentials, at, hosts = parts.netloc.rpartition("@")
    user = credentials.partition(":")[0]
    options = "&".join(f"{name}=***" for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    return urlunsplit(parts._replace(netloc=f"{user}:***@{hosts}" if at else hosts, query=options))


async def _livez(request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _readyz(request: web.Request) -> web.Response:
    runtime = request.app[RUNTIME]
    if runtime.ready:
        return web.Response(text="ok\n")
    reason = "draining" if runtime.draining else "no engine has answered a health check yet"
    return web.Response(status=503, text=f"{reason}\n")


async def _metrics(request: web.Request) -> web.Response:
    runtime = request.app[RUNTIME]
    runtime.refresh_gauges()
    return web.Response(body=runtime.metrics.render(), headers={"Content-Type": CONTENT_TYPE})


async def _pools(request: web.Request) -> web.Response:
    runtime = request.app[RUNTIME]
    return json_response({name.value: _pool_document(runtime, name) for name in Pool})


def _pool_document(runtime: Runtime, name: Pool) -> dict[str, Any]:
    pool = runtime.pools[name]
    return {
        "readyReplicas": len(pool.ready),
        "inFlight": pool.in_flight,
        "queued": pool.queued,
        "timeToFirstTokenSeconds": pool.time_to_first_token_seconds,
        "timePerOutputTokenSeconds": pool.time_per_output_token_seconds,
        "replicas": [
            {
                "id": replica.id,
                "url": replica.url,
                "ready": replica.ready,
                "inFlight": replica.in_flight,
                "maxInFlight": pool.slots(replica),
            }
            for replica in pool.replicas.values()
        ],
    }


async def _config(request: web.Request) -> web.Response:
    document = request.app[RUNTIME].config.model_dump(mode="json", by_alias=True)
    document["session"]["redisUrl"] = redacted(document["session"]["redisUrl"])
    return json_response(document)


async def _decisions(request: web.Request) -> web.StreamResponse:
    """The decision log of this gateway replica, oldest entries first."""
    entries = request.app[RUNTIME].decision_log
    if entries is None:
        return json_response(
            {"error": "there is no decision log; set routing.decisionLog to the path of a file"}, 404
        )
    content = entries.read()
    try:
        first = await anext(content, b"")
    except OSError as error:
        return json_response({"error": f"the decision log cannot be read: {error.strerror}"}, 503)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    await response.write(first)
    async for chunk in content:
        await response.write(chunk)
    return response


def _requested_session(request: web.Request) -> tuple[Runtime, Any, SessionId]:
    """The session named by /sessions/{id}?tenant=NAME.

    The id is a value of the x-dps-session header, or the session id that the client sends.
    """
    runtime = request.app[RUNTIME]
    scope = runtime.scope(request.query.get("tenant", ""))
    return runtime, scope, SessionId.of_client(scope, request.match_info["id"])


async def _session(request: web.Request) -> web.Response:
    runtime, scope, session = _requested_session(request)
    snapshot = await runtime.turns.store.read(scope, session)
    if snapshot.record is None:
        return json_response(
            {"error": f"session {session.text} does not exist", "source": snapshot.source.value}, 404
        )
    return json_response(session_document(session, snapshot.record, snapshot.source.value))


async def _delete_session(request: web.Request) -> web.Response:
    runtime, scope, session = _requested_session(request)
    try:
        known = await runtime.turns.store.delete(scope, session)
    except StoreUnavailable as error:
        return json_response({"error": f"Redis did not answer: {error}"}, 503)
    return json_response({"session": session.text, "deleted": known}, 200 if known else 404)
