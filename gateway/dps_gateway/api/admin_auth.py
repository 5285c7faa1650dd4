"""The token that protects session state on the admin port (`listen.adminTokenFile`)."""

import hmac
import ipaddress

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from dps_gateway.api.call import RUNTIME


def protected(handler: Handler) -> Handler:
    """The handler for requests with the token; others are answered with 401.

    Without a configured token, only requests of the same host pass.
    """

    async def checked(request: web.Request) -> web.StreamResponse:
        token = request.app[RUNTIME].admin_token
        if token is None:
            if is_local(request.remote):
                return await handler(request)
            return _unauthorized(
                "set listen.adminTokenFile, and send its token, to use this from another host"
            )
        if _matches(token, request.headers.get("Authorization", "")):
            return await handler(request)
        return _unauthorized("send 'Authorization: Bearer TOKEN' with the token in listen.adminTokenFile")

    return checked


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
