"""The token that protects session state on the admin port (`listen.adminTokenFile`)."""

import hmac

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from dps_gateway.api.call import RUNTIME


def protected(handler: Handler) -> Handler:
    """The handler for requests with the token; others are answered with 401. Without a configured token, all pass."""

    async def checked(request: web.Request) -> web.StreamResponse:
        token = request.app[RUNTIME].admin_token
        if token is None or _matches(token, request.headers.get("Authorization", "")):
            return await handler(request)
        error = {"error": "send 'Authorization: Bearer TOKEN' with the token in listen.adminTokenFile"}
        return web.Response(
            status=401,
            body=orjson.dumps(error),
            headers={"WWW-Authenticate": "Bearer"},
            content_type="application/json",
        )

    return checked


def _matches(token: str, header: str) -> bool:
    scheme, _, sent = header.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        token.encode(), sent.strip().encode("utf-8", "surrogateescape")
    )
