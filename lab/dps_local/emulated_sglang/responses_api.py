"""/v1/responses, OpenAI's Responses API, with the events and the response store of SGLang 0.5.23.

A request is converted to a chat request with the gateway's conversion, which is tested against SGLang's.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from aiohttp import web
from pydantic import Field

from dps_gateway.prompt.responses import chat_request
from dps_local.emulated_sglang.answer import Event, Form, answer, final_outputs
from dps_local.emulated_sglang.driver import Engine, EngineRequest, Output
from dps_local.emulated_sglang.http import (
    BadBodyError,
    RefusedError,
    json_response,
    read_body,
)
from dps_local.emulated_sglang.openai_api import converted_chat, requests_of
from dps_local.emulated_sglang.protocol import CacheFields

RESERVED_TOKENS = 2
"""SGLang subtracts these from `max_output_tokens`."""

STATUSES = {"stop": "completed", "length": "incomplete", "abort": "failed"}
"""The statuses of responses by the finish reasons of their answers."""

STORE_DISABLED = (
    "Response store is disabled. Stateful Responses require --enable-response-store on a standalone server; "
    "response storage is unavailable in PD mode."
)


class ResponsesRequest(CacheFields):
    """The fields of SGLang's model that the emulation uses or that the response repeats."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    background: bool | None = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    request_id: str = Field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_p: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def items(self) -> list[dict[str, Any]]:
        """The input as a list of items."""
        return [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input

    def sampling_fields(self) -> dict[str, Any]:
        """The sampling fields of the chat request."""
        longest = self.max_output_tokens
        return {
            "max_tokens": longest - RESERVED_TOKENS if longest is not None else None,
            "temperature": 0.7 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "stream": bool(self.stream),
            "rid": self.request_id,
            "extra_key": self.extra_key,
            "cache_salt": self.cache_salt,
        }


Store = Callable[[ResponsesRequest, dict[str, Any]], None]
"""Stores a response, if the engine stores responses and the request does not decline it."""


class ResponsesEndpoints:
    """The endpoints of OpenAI's Responses API of one engine, and its response store."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stores = engine.settings.enable_response_store
        self._stored: dict[str, dict[str, Any]] = {}
        self._items: dict[str, list[dict[str, Any]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        try:
            request = await read_body(http, ResponsesRequest)
        except BadBodyError as error:
            raise _refused(str(error), kind="Bad Request") from error
        requests = await self._requests(http, request)
        form = _Form(request, self._engine, self._store)
        if not request.background or request.stream:
            return await answer(http, self._engine, requests, bool(request.stream), form)
        queued = _response(request, "queued")
        self._store(request, queued)
        self._tasks[request.request_id] = asyncio.create_task(self._run(request, requests, form))
        return json_response(queued)

    async def _run(self, request: ResponsesRequest, requests: Sequence[EngineRequest], form: "_Form") -> None:
        """Answer in the background."""
        try:
            form.whole(await final_outputs(self._engine, requests, form))
        except RefusedError:
            self._stored[request.request_id]["status"] = "failed"
        finally:
            del self._tasks[request.request_id]

    async def retrieve(self, http: web.Request) -> web.Response:
        """GET /v1/responses/{id}."""
        return json_response(self._response_of(http.match_info["id"]))

    async def cancel(self, http: web.Request) -> web.Response:
        """POST /v1/responses/{id}/cancel."""
        response = self._response_of(http.match_info["id"])
        if response["status"] in ("queued", "in_progress"):
            response["status"] = "cancelled"
            self._tasks[response["id"]].cancel()
        return json_response(response)

    async def stop(self) -> None:
        """Cancel the requests that run in the background."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _response_of(self, response_id: str) -> dict[str, Any]:
        """A stored response. Raises RefusedError."""
        if not self._stores:
            raise _refused(STORE_DISABLED, param="response_id")
        if not response_id.startswith("resp_"):
            raise _refused(
                f"Invalid 'response_id': '{response_id}'. Expected an ID that begins with 'resp'.",
                param="response_id",
            )
        if response_id not in self._stored:
            message = f"Response with id '{response_id}' not found."
            raise _refused(message, status=404, param="response_id")
        return self._stored[response_id]

    async def _requests(self, http: web.Request, request: ResponsesRequest) -> list[EngineRequest]:
        """The engine's request. Raises RefusedError."""
        for field in ("previous_response_id", "background"):
            if getattr(request, field) and not self._stores:
                raise _refused(STORE_DISABLED, param=field)
        if (
            request.model is not None
            and request.model.partition(":")[0] != self._engine.settings.served_model_name
        ):
            message = f"The model '{request.model}' does not exist"
            raise _refused(message, status=404, param="model")
        items = request.items
        if request.previous_response_id is not None:
            self._response_of(request.previous_response_id)
            items = [*self._items[request.previous_response_id], *items]
        if not items and not request.instructions:
            raise _refused(
                "Cannot apply chat template to an empty conversation. Provide at least one message. None"
            )
        convert = partial(chat_request, inline_system=self._engine.prompts.renders_inline_system)
        body, fields = request.model_dump() | {"input": items}, request.sampling_fields()
        try:
            chat, prompt = await converted_chat(http, self._engine, convert, body, fields)
        except ValueError as error:
            raise _refused(str(error)) from error
        return requests_of(chat, [prompt])

    def _store(self, request: ResponsesRequest, response: dict[str, Any]) -> None:
        if not self._stores or not request.store:
            return
        previous = self._items[request.previous_response_id] if request.previous_response_id else []
        self._stored[response["id"]] = response
        self._items[response["id"]] = [*previous, *request.items, *response["output"]]


class _Form(Form):
    headers = MappingProxyType({"Cache-Control": "no-cache"})
    ending = b""
    named_events = True

    def __init__(self, request: ResponsesRequest, engine: Engine, store: Store) -> None:
        super().__init__(engine)
        self._request = request
        self._store = store
        self._numbers = itertools.count()
        self._item = _message("")
        self._place = {"item_id": self._item["id"], "output_index": 0, "content_index": 0}

    def whole(self, finals: Sequence[Output]) -> dict[str, Any]:
        (output,) = finals
        return self._completed(output, _message(output.text) if output.text else None)

    def begin(self) -> Iterable[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=_response(self._request, "in_progress"))

    def part(self, output: Output) -> Iterable[Event]:
        text = self.new_text(output)
        if text and text == output.text:
            opening = self._item | {"content": [], "status": "in_progress"}
            yield self._event("response.output_item.added", item=opening, output_index=0)
            yield self._event("response.content_part.added", part=_part(""), **self._place)
        if text:
            yield self._event("response.output_text.delta", delta=text, logprobs=[], **self._place)

    def end(self) -> Iterable[Event]:
        output, item = self.last[0], self._item
        if output.text:
            item["content"] = [_part(output.text)]
            yield self._event("response.output_text.done", text=output.text, logprobs=[], **self._place)
            yield self._event("response.content_part.done", part=_part(output.text), **self._place)
            yield self._event("response.output_item.done", item=item, output_index=0)
        response = self._completed(output, item if output.text else None)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, message: str, status: int) -> Iterable[Event]:
        fields = {"error": {"code": "server_error", "message": message}}
        if status != HTTPStatus.BAD_REQUEST:
            fields["usage"] = _usage(0, 0, 0)
        yield self._event("response.failed", response=_response(self._request, "failed") | fields)

    def refused(self, message: str, status: int) -> RefusedError:
        return _refused(message if status == HTTPStatus.BAD_REQUEST else f"{status}: {message}")

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, **fields, "sequence_number": next(self._numbers)}

    def _completed(self, output: Output, item: dict[str, Any] | None) -> dict[str, Any]:
        """The complete response, which is also stored."""
        reason = output.sequence.finish_reason
        assert reason is not None
        status = STATUSES[reason["type"]]
        response = _response(self._request, status) | {
            "error": {"code": "server_error", "message": reason["message"]} if status == "failed" else None,
            "output": [item] if item else [],
            "usage": _usage(output.sequence.prompt_tokens, output.tokens, self.cached_tokens(output)),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        }
        self._store(self._request, response)
        return response


def _refused(
    message: str, *, status: int = 400, param: str | None = None, kind: str = "invalid_request_error"
) -> RefusedError:
    error = {"message": message, "type": kind, "param": param, "code": status}
    return RefusedError(message, json_response({"error": error}, status))


def _usage(input_tokens: int, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _message(text: str) -> dict[str, Any]:
    """The output item for an answer."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "phase": "final_answer",
        "content": [_part(text)],
    }


def _response(request: ResponsesRequest, status: str) -> dict[str, Any]:
    """The response to a request, without output and usage."""
    return {
        "id": request.request_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": request.model,
        "output": [],
        "status": status,
        "usage": None,
        "parallel_tool_calls": True,
        "tool_choice": request.tool_choice,
        "tools": request.tools,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "previous_response_id": request.previous_response_id,
        "store": request.store,
        "metadata": request.metadata or {},
    }
