"""The HTTP server: its connections, and requests that cannot be parsed, which are logged without their content."""

import asyncio
import logging
from typing import Any, Final

from aiohttp import web

from dps_gateway.api.errors import (
    RETRY_AFTER_SECONDS,
    BadRequest,
    ExpectationFailed,
    GatewayFull,
    error_object,
    error_response,
    errors_of,
)
from dps_gateway.api.request import request_id_of
from dps_gateway.client_connections import ClientConnections

log = logging.getLogger(__name__)

REFUSAL_SECONDS: Final = 1.0
"""Time for a refused client to read its response. Closing a connection immediately can discard what was sent on it."""

MAX_REFUSALS: Final = 32
"""Maximum number of refused connections that are open; further ones are closed without a response."""


class _Connection(web.RequestHandler):
    """A client connection.

    aiohttp's own error response and log line quote the malformed part of a request, which may be an API key.
    """

    def __init__(self, server: "_Server", **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        clients = self._server.clients
        if clients is None or clients.opened(self):
            super().connection_made(transport)
        else:
            self._server.refuse(transport)
            self.force_close()

    def data_received(self, data: bytes) -> None:
        clients = self._server.clients
        if clients is not None:
            clients.received(self)
        super().data_received(data)
        if clients is not None and self._messages:
            # The request is handled in a later iteration of the event loop. The connection must not be closed in favour
            # of a new one until then.
            clients.began(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._server.clients is not None:
            self._server.clients.closed(self)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection immediately."""
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        log.warning("malformed request from %s: %s", request.remote, type(exc).__name__)
        error = BadRequest("the request is not valid HTTP")
        response = web.Response(status=status, body=error_object(error), content_type="application/json")
        response.force_close()
        return response


class _Server(web.Server):
    clients: ClientConnections | None = None
    """The connections of a TCP port; None for a Unix socket, whose connections are not limited."""
    _full = ""
    """The message to a client that is refused because there are too many connections."""
    _refused = 0

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def limit(self, clients: ClientConnections, full: str) -> None:
        """Record in `clients` what each connection waits for. `full` is the message to clients that are refused."""
        self.clients, self._full, handle = clients, full, self.request_handler

        async def tracked(request: web.BaseRequest) -> web.StreamResponse:
            connection = request.protocol
            assert isinstance(connection, _Connection)
            clients.began(connection)
            try:
                return await handle(request)
            finally:
                clients.ended(connection)

        self.request_handler = tracked

    def refuse_expectations(self) -> None:
        """Answer requests with an unknown Expect header with an error object. aiohttp's response quotes the header."""
        handle = self.request_handler

        async def checked(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await handle(request)
            except web.HTTPExpectationFailed:
                error = ExpectationFailed("the gateway supports only 'Expect: 100-continue'")
                return error_response(error, request_id_of(request), errors_of(request.path))

        self.request_handler = checked

    def refuse(self, transport: asyncio.BaseTransport) -> None:
        """Answer a new connection with 503, and close it once the client has had time to read the response."""
        assert isinstance(transport, asyncio.Transport)
        if self._refused >= MAX_REFUSALS:
            transport.abort()
            return
        self._refused += 1
        transport.write(_refusal(self._full))
        self._loop.call_later(REFUSAL_SECONDS, self._close_refused, transport)

    def _close_refused(self, transport: asyncio.Transport) -> None:
        self._refused -= 1
        transport.close()


def _refusal(message: str) -> bytes:
    body = error_object(GatewayFull(message))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        f"Retry-After: {RETRY_AFTER_SECONDS}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


class Runner(web.AppRunner):
    """Runs an application, like `web.AppRunner`, on this module's server.

    clients: limits its connections.
    full: the message to a client that is refused because there are too many.
    """

    def __init__(
        self,
        app: web.Application,
        clients: ClientConnections | None = None,
        full: str = "the gateway has too many connections (limits.maxConnections)",
        **options: Any,
    ) -> None:
        super().__init__(app, **options)
        self._clients = clients
        self._full = full

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server  # aiohttp has no parameter for the class of its connections
        assert isinstance(server, _Server)
        server.refuse_expectations()
        if self._clients is not None:
            server.limit(self._clients, self._full)
        return server
