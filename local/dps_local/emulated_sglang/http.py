"""Shared by the endpoints: bodies in, JSON and server-sent events out, errors in SGLang's shapes."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ValidationError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Model = TypeVar("Model", bound=BaseModel)
Given = TypeVar("Given")
Result = TypeVar("Result")

LONG_BODY_BYTES = 8192
DISCONNECT_AFTER_CHUNKS = web.RequestKey("disconnect_after_chunks", int)

OPEN_PREFIXES = ("/health", "/ready", "/metrics")
"""Paths that need no API key, by prefix, as in SGLang's utils/auth.py."""


class BadBodyError(Exception):
    """A body that is not what the endpoint takes; answered with 400."""


def json_response(content: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def error_response(message: str, kind: str = "BadRequestError", status: int = 400) -> web.Response:
    """SGLang's ErrorResponse object."""
    return json_response(
        {"object": "error", "message": message, "type": kind, "param": None, "code": status}, status
    )


async def read_body(request: web.Request, model: type[Model]) -> Model:
    """The request's JSON as `model`; BadBodyError says what FastAPI would."""
    content_type = request.headers.get("content-type", "").lower().split(";", 1)[0].strip()
    if content_type != "application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        problem = {"loc": ("header", "content-type"), "msg": message, "type": "value_error"}
        raise BadBodyError(_validation_message([problem]))
    try:
        return model.model_validate(orjson.loads(await request.read()))
    except orjson.JSONDecodeError as error:
        raise BadBodyError(
            _validation_message(
                [{"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error"}]
            )
        ) from error
    except ValidationError as error:
        raise BadBodyError(
            _validation_message(
                [
                    problem | {"loc": ("body", *problem["loc"])}
                    for problem in error.errors(include_url=False, include_context=False)
                ]
            )
        ) from error


async def off_loop_if_long(request: web.Request, work: Callable[[Given], Result], given: Given) -> Result:
    """`work(given)`, in a thread if the request is long: rendering and tokenizing it would hold others up."""
    if (request.content_length or 0) > LONG_BODY_BYTES:
        return await asyncio.to_thread(work, given)
    return work(given)


def _validation_message(errors: Any) -> str:
    count = f"{len(errors)} validation error{'s' if len(errors) > 1 else ''}"
    return f"{count}:\n" + "\n".join(f"  {error}" for error in errors)


class EventStream:
    """A server-sent event response, opened by its first event unless `open` came before."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        self._cut_after: int | None = request.get(DISCONNECT_AFTER_CHUNKS)

    async def open(self) -> None:
        """Send status and headers."""
        await self._response.prepare(self._request)

    async def send(self, event: dict[str, Any]) -> None:
        """Send one event; where the fault injection says so, drop the connection instead."""
        if not self._response.prepared:
            await self.open()
        if self._cut_after == 0 and self._request.transport:
            self._request.transport.abort()
            raise ConnectionResetError("disconnected on purpose")
        if self._cut_after is not None:
            self._cut_after -= 1
        await self._response.write(b"data: " + orjson.dumps(event) + b"\n\n")

    async def close(self) -> web.StreamResponse:
        """End the stream with `[DONE]`."""
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Failures as SGLang's FastAPI application shows them."""
    try:
        return await handler(request)
    except BadBodyError as error:
        return error_response(str(error), "Bad Request")
    except web.HTTPException as error:
        response = json_response({"detail": error.reason}, error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        return web.Response()  # the client has gone: nobody reads this
    except Exception as error:
        if request.writer.output_size:
            raise
        logging.getLogger(__name__).exception("a request failed")
        return error_response(f"Internal server error: {error}", "InternalServerError", 500)


async def starlette_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """A signal for on_response_prepare: the headers that SGLang's web framework adds or leaves out."""
    response.headers["Vary"] = "Origin"
    if "Content-Type" in response.headers and response.content_type == "application/octet-stream":
        del response.headers["Content-Type"]


def require_api_key(api_key: str) -> Middleware:
    """A middleware that wants `Authorization: Bearer <api_key>`, except from probes and Prometheus."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        is_open = request.path.startswith(OPEN_PREFIXES) or request.method == "OPTIONS"
        matches = scheme.lower() == "bearer" and secrets.compare_digest(given.encode(), api_key.encode())
        return await handler(request) if is_open or matches else json_response({"error": "Unauthorized"}, 401)

    return middleware
