"""HTTP helpers of the endpoints: request bodies, JSON and event-stream responses, errors in SGLang's format."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ValidationError

from dps_local.emulated_sglang.driver import ACCEPTANCE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Model = TypeVar("Model", bound=BaseModel)
Argument = TypeVar("Argument")
Result = TypeVar("Result")

LONG_BODY_BYTES = 8192
DISCONNECT_AFTER_CHUNKS = web.RequestKey("disconnect_after_chunks", int)
"""The injected fault: how many events a stream sends before its connection is dropped."""

ACCEPTANCE_HEADER = "x-emulate-acceptance"
"""The probability that a draft token of the answer is accepted if the previous ones were."""

OPEN_PREFIXES = ("/health", "/ready", "/metrics")
"""Prefixes of the paths that require no API key, as in SGLang's utils/auth.py."""


def json_response(content: Any, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def error_object(message: str, kind: str, status: int) -> dict[str, Any]:
    """SGLang's ErrorResponse object."""
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def error_response(message: str, kind: str = "BadRequestError", status: int = 400) -> web.Response:
    """An answer with SGLang's ErrorResponse object."""
    return json_response(error_object(message, kind, status), status)


class RefusedError(Exception):
    """The request is answered with an error response, in the format of its API."""

    def __init__(self, message: str, response: web.Response) -> None:
        super().__init__(message)
        self.response = response


class BadBodyError(RefusedError):
    """The request body is invalid.

    `problems` are FastAPI's descriptions of the errors, with their location (`loc`) and message (`msg`).
    """

    def __init__(self, problems: Sequence[Mapping[str, Any]]) -> None:
        count = f"{len(problems)} validation error{'s' if len(problems) > 1 else ''}"
        message = f"{count}:\n" + "\n".join(f"  {problem}" for problem in problems)
        super().__init__(message, error_response(message, "Bad Request"))
        self.problems = problems


async def read_body(request: web.Request, model: type[Model]) -> Model:
    """The request's JSON body as `model`. Raises BadBodyError with FastAPI's message if it is invalid."""
    content_type = request.headers.get("content-type", "").lower().split(";", 1)[0].strip()
    if content_type != "application/json":
        message = "Unsupported Media Type: Only 'application/json' is allowed"
        raise BadBodyError([{"loc": ("header", "content-type"), "msg": message, "type": "value_error"}])
    try:
        return model.model_validate(orjson.loads(await request.read()))
    except orjson.JSONDecodeError as error:
        problem: dict[str, Any] = {
            "type": "json_invalid",
            "loc": ("body", error.pos),
            "msg": "JSON decode error",
        }
        raise BadBodyError([problem]) from error
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
        raise BadBodyError([dict(item) | {"loc": ("body", *item["loc"])} for item in problems]) from error


async def off_loop_if_long(
    request: web.Request, work: Callable[[Argument], Result], argument: Argument
) -> Result:
    """Call `work(argument)`, in a thread if the request is long.

    Rendering and tokenizing a long prompt would block the event loop.
    """
    if (request.content_length or 0) > LONG_BODY_BYTES:
        return await asyncio.to_thread(work, argument)
    return work(argument)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn exceptions into the responses of SGLang's FastAPI application."""
    try:
        return await handler(request)
    except RefusedError as refused:
        return refused.response
    except web.HTTPException as error:
        response = json_response({"detail": error.reason}, error.status)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        return web.Response()  # the client has disconnected, so the content does not matter
    except Exception as error:
        if request.writer.output_size:
            raise
        logging.getLogger(__name__).exception("a request failed")
        return error_response(f"Internal server error: {error}", "InternalServerError", 500)


@web.middleware
async def acceptance(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Use the acceptance probability in the header `x-emulate-acceptance`, if a request has one."""
    if text := request.headers.get(ACCEPTANCE_HEADER):
        try:
            ACCEPTANCE.set(min(1.0, max(0.0, float(text))))
        except ValueError:
            return error_response(f"{ACCEPTANCE_HEADER}: '{text}' is not a number", "Bad Request")
    return await handler(request)


async def starlette_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """An on_response_prepare signal: add and remove headers as SGLang's web framework does."""
    response.headers["Vary"] = "Origin"
    if "Content-Type" in response.headers and response.content_type == "application/octet-stream":
        del response.headers["Content-Type"]


def require_api_key(api_key: str) -> Middleware:
    """A middleware that requires `Authorization: Bearer <api_key>`, except for probes and metrics."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        is_open = request.path.startswith(OPEN_PREFIXES) or request.method == "OPTIONS"
        matches = scheme.lower() == "bearer" and secrets.compare_digest(key.encode(), api_key.encode())
        return await handler(request) if is_open or matches else json_response({"error": "Unauthorized"}, 401)

    return middleware
