"""The HTTP server: requests that cannot be parsed are answered and logged without repeating their content."""

import logging

from aiohttp import web

from dps_gateway.api.errors import BadRequest, error_object

log = logging.getLogger(__name__)


class _Connection(web.RequestHandler):
    """A client connection.

    aiohttp's own error response and log line quote the malformed part of a request, which may be an API key.
    """

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
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application, like `web.AppRunner`, on this module's server."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server  # aiohttp has no parameter for the class of its connections
        return server
