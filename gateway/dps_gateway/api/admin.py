"""The admin port: probes, metrics, and the state of this gateway replica.

Responses contain no prompts and no secrets.
"""

import hmac
import ipaddress
from base64 import b64decode
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from dps_gateway.api.call import RUNTIME
from dps_gateway.api.page import live, page_file, pool_document, records, what_if
from dps_gateway.runtime import Runtime
from dps_gateway.session.identity import SessionId
from dps_gateway.session.redis import StoreUnavailable
from dps_gateway.telemetry.metrics import CONTENT_TYPE


def admin_app(runtime: Runtime) -> web.Application:
    """The application of the admin port."""
    app = web.Application()
    app[RUNTIME] = runtime
    app.router.add_get("/livez", _livez)
    app.router.add_get("/readyz", _readyz)
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/pools", _pools)
    app.router.add_get("/config", _config)
    for path in ("/", "/page/{name}"):
        app.router.add_get(path, protected(page_file))
    app.router.add_get("/live", protected(live))
    app.router.add_get("/records", protected(records))
    app.router.add_post("/what-if", protected(what_if))
    app.router.add_get("/decisions", protected(_decisions))
    app.router.add_get("/sessions/{id}", protected(_session))
    app.router.add_delete("/sessions/{id}", protected(_delete_session))
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
    return _json({name.value: pool_document(pool) for name, pool in request.app[RUNTIME].pools.items()})


async def _config(request: web.Request) -> web.Response:
    document = request.app[RUNTIME].config.model_dump(mode="json", by_alias=True)
    document["session"]["redisUrl"] = redacted(document["session"]["redisUrl"])
    return _json(document)


async def _decisions(request: web.Request) -> web.StreamResponse:
    """The decision log of this gateway replica, oldest entries first."""
    entries = request.app[RUNTIME].decision_log
    if entries is None:
        return _json(
            {"error": "there is no decision log; set routing.decisionLog to the path of a file"}, 404
        )
    content = entries.read()
    try:
        first = await anext(content, b"")
    except OSError as error:
        return _json({"error": f"the decision log cannot be read: {error.strerror}"}, 503)
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
        return _json(
            {"error": f"session {session.text} does not exist", "source": snapshot.source.value}, 404
        )
    return _json(snapshot.document())


async def _delete_session(request: web.Request) -> web.Response:
    runtime, scope, session = _requested_session(request)
    try:
        known = await runtime.turns.store.delete(scope, session)
    except StoreUnavailable as error:
        return _json({"error": f"Redis did not answer: {error}"}, 503)
    return _json({"session": session.text, "deleted": known}, 200 if known else 404)


def protected(handler: Handler) -> Handler:
    """The handler for requests with the token (`listen.adminTokenFile`); others are answered with 401.

    A browser sends the token as the password of Basic authentication. Without a configured token, only requests from
    the same host are accepted.
    """

    async def checked(request: web.Request) -> web.StreamResponse:
        token = request.app[RUNTIME].admin_token
        if token is None:
            permitted = is_local(request.remote) and _is_address(request.host)
            message = "set listen.adminTokenFile, and use its token, to use this from another host"
        else:
            permitted = _matches(token, request.headers.get("Authorization", ""))
            message = "send 'Authorization: Bearer TOKEN' with the token in listen.adminTokenFile, "
            message += "or the token as password"
        if permitted:
            return await handler(request)
        response = _json({"error": message}, 401)
        response.headers["WWW-Authenticate"] = 'Basic realm="DPS Router"'
        response.headers.add("WWW-Authenticate", "Bearer")
        return response

    return checked


def is_local(remote: str | None) -> bool:
    """Whether a connection comes from this host. A container has the address of its pod, not of its node.

    Of the loopback addresses, only the usual ones count: service meshes forward requests of other pods from others,
    such as 127.0.0.6 (Istio).
    """
    try:
        address = ipaddress.ip_address(remote or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address) in ("127.0.0.1", "::1")


def _is_address(host: str) -> bool:
    """Whether a Host header has an address or `localhost`.

    The page of another site could read this port by a name that its DNS server resolves to 127.0.0.1.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name != "localhost":
            ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _matches(token: str, header: str) -> bool:
    scheme, _, sent = header.partition(" ")
    password = sent.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic":
        try:
            password = b64decode(password).partition(b":")[2]
        except ValueError:
            return False
    return scheme.lower() in ("bearer", "basic") and hmac.compare_digest(token.encode(), password)


def _json(document: Any, status: int = 200) -> web.Response:
    """A response with a document that orjson can serialize, indented for the people who read it."""
    body = orjson.dumps(document, option=orjson.OPT_INDENT_2)
    return web.Response(body=body, status=status, content_type="application/json")
