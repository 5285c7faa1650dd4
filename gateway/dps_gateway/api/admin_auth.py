"""The token that protects session state on the admin port (`listen.adminTokenFile`)."""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from dps_gateway.api.call import RUNTIME
from dps_gateway.session.peer_signature import SIGNATURE, signed_request


def protected(handler: Handler) -> Handler:
    """The handler for requests with the token; others are answered with 401.

    Without a configured token, only requests from the same host are accepted.
    """

    async def checked(request: web.Request) -> web.StreamResponse:
        token = request.app[RUNTIME].admin_token
        if token is None:
            return await _if_local(request, handler)
        if _matches(token, request.headers.get("Authorization", "")):
            return await handler(request)
        return _unauthorized("send 'Authorization: Bearer TOKEN' with the token in listen.adminTokenFile")

    return checked


def for_peers(handler: Callable[[web.Request], Awaitable[web.Response]]) -> Handler:
    """The handler for requests that other replicas have signed with the token; it signs the answers.

    Other requests are answered with 401. Without a configured token, only requests from the same host are accepted.
    """

    async def checked(request: web.Request) -> web.StreamResponse:
        token = request.app[RUNTIME].admin_token
        if token is None:
            return await _if_local(request, handler)
        authorization = request.headers.get("Authorization", "")
        signed = signed_request(token, authorization, request.method, request.path)
        if signed is None or not signed.contains(await request.read()):
            return _unauthorized("only replicas with the token in listen.adminTokenFile may use this")
        response = await handler(request)
        content = response.body
        assert content is None or isinstance(content, bytes)
        response.headers[SIGNATURE] = signed.answer_signature(content or b"")
        return response

    return checked


async def _if_local(request: web.Request, handler: Handler) -> web.StreamResponse:
    if is_local(request.remote):
        return await handler(request)
    return _unauthorized("set listen.adminTokenFile, and use its token, to use this from another host")


def _unauthorized(message: str) -> web.Response:
    return web.Response(
        status=401,
        body=orjson.dumps({"error": message}),
        headers={"WWW-Authenticate": "Bearer"},
        content_type="application/json",
    )


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


def _matches(token: str, header: str) -> bool:
    scheme, _, sent = header.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        token.encode(), sent.strip().encode("utf-8", "surrogateescape")
    )
