"""/v1/responses, OpenAI's Responses API, with the events and the response store of SGLang 0.5.23.

A request is converted to a chat request with the gateway's conversion, which is tested against SGLang's.
"""

import asyncio
import itertools
import time
import uuid
from contextlib import aclosing
from typing import Any

from aiohttp import web
from pydantic import Field, ValidationError

from dps_gateway.prompt.responses import chat_request
from dps_local.emulated_sglang import results
from dps_local.emulated_sglang.driver import Engine, Output
from dps_local.emulated_sglang.http import (
    BadBodyError,
    EventStream,
    RefusedError,
    json_response,
    off_loop_if_long,
    read_body,
)
from dps_local.emulated_sglang.openai_api import OpenAIEndpoints
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.protocol import CacheFields, ChatRequest

RESERVED_TOKENS = 2
"""SGLang subtracts these from `max_output_tokens`."""

STORE_DISABLED = (
    "Response store is disabled. Stateful Responses require --enable-response-store on a standalone server; "
    "response storage is unavailable in PD mode."
)
STREAM_HEADERS = {"Cache-Control": "no-cache"}


class ResponsesRequest(CacheFields):
    """The fields of SGLang's model that the emulation uses or that the response repeats."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    background: bool | None = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    request_id: str = Field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    text: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_p: float | None = None
    truncation: str | None = "disabled"
    user: str | None = None
    stop: str | list[str] | None = None
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
            "stop": self.stop,
            "stream": bool(self.stream),
            "extra_key": self.extra_key,
            "cache_salt": self.cache_salt,
        }


class ResponsesEndpoints:
    """The endpoints of OpenAI's Responses API of one engine, and its response store."""

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        openai: OpenAIEndpoints,
        model: str,
        *,
        cache_report: bool,
        stores: bool,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._openai = openai
        self._model = model
        self._cache_report = cache_report
        self._stores = stores
        self._stored: dict[str, dict[str, Any]] = {}
        self._items: dict[str, list[dict[str, Any]]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        request = await _read(http)
        chat, prompt = await self._chat(http, request)
        if request.background and not request.stream:
            return json_response(self._start(request, chat, prompt))
        if request.stream:
            return await self._stream(http, request, chat, prompt)
        return json_response(await self._answer(request, chat, prompt))

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

    async def _chat(self, http: web.Request, request: ResponsesRequest) -> tuple[ChatRequest, results.Prompt]:
        """The chat request and its prompt. Raises RefusedError."""
        for field in ("previous_response_id", "background"):
            if getattr(request, field) and not self._stores:
                raise _refused(STORE_DISABLED, param=field)
        if request.model is not None and request.model.partition(":")[0] != self._model:
            message = f"The model '{request.model}' does not exist"
            raise _refused(message, status=404, param="model")
        items = request.items
        if request.previous_response_id is not None:
            self._response_of(request.previous_response_id)
            items = [*self._items[request.previous_response_id], *items]
        try:
            body = request.model_dump() | {"input": items}
            fields = chat_request(body, inline_system=self._prompts.renders_inline_system)
            chat = ChatRequest.model_validate(fields | request.sampling_fields())
            if not chat.messages:
                raise _refused(
                    "Cannot apply chat template to an empty conversation. Provide at least one message. None"
                )
            if problem := self._openai.problem_of_chat(chat):
                raise _refused(problem)
            return chat, await off_loop_if_long(http, self._prompts.encode_chat, chat)
        except (AttributeError, KeyError, TypeError, ValidationError, ValueError) as error:
            raise _refused(str(error)) from error

    async def _answer(
        self, request: ResponsesRequest, chat: ChatRequest, prompt: results.Prompt
    ) -> dict[str, Any]:
        """The complete response. Raises RefusedError."""
        params = chat.sampling(chat.longest_answer)
        try:
            (output,) = await results.final_outputs(
                self._engine, [prompt], params, [request.request_id], chat.namespaces(1, batch=False)
            )
        except ValueError as error:
            raise _refused(str(error)) from error
        response = self._completed(request, output, _message(output.text) if output.text else None)
        self._store(request, response)
        return response

    def _start(self, request: ResponsesRequest, chat: ChatRequest, prompt: results.Prompt) -> dict[str, Any]:
        """Begin to answer in the background. Returns the queued response."""
        response = _response(request, "queued")
        self._store(request, response)

        async def run() -> None:
            try:
                await self._answer(request, chat, prompt)
            except RefusedError:
                self._stored[request.request_id]["status"] = "failed"
            finally:
                del self._tasks[request.request_id]

        self._tasks[request.request_id] = asyncio.create_task(run())
        return response

    def _store(self, request: ResponsesRequest, response: dict[str, Any]) -> None:
        if not self._stores or not request.store:
            return
        previous = self._items[request.previous_response_id] if request.previous_response_id else []
        self._stored[response["id"]] = response
        self._items[response["id"]] = [*previous, *request.items, *response["output"]]

    async def _stream(
        self, http: web.Request, request: ResponsesRequest, chat: ChatRequest, prompt: results.Prompt
    ) -> web.StreamResponse:
        stream, numbers = EventStream(http, STREAM_HEADERS), itertools.count()

        async def send(kind: str, **fields: Any) -> None:
            await stream.send({"type": kind, **fields, "sequence_number": next(numbers)}, kind)

        for kind in ("response.created", "response.in_progress"):
            await send(kind, response=_response(request, "in_progress"))
        item = _message("")
        opening = item | {"content": [], "status": "in_progress"}
        place: dict[str, Any] = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        sent = 0
        output: Output | None = None
        runs = results.outputs(
            self._engine,
            [prompt],
            chat.sampling(chat.longest_answer),
            True,
            [request.request_id],
            chat.namespaces(1, batch=False),
        )
        try:
            async with aclosing(runs) as run:
                async for _, output in run:
                    if not sent and output.text:
                        await send("response.output_item.added", item=opening, output_index=0)
                        await send("response.content_part.added", part=_part(""), **place)
                    if delta := output.text[sent:]:
                        await send("response.output_text.delta", delta=delta, logprobs=[], **place)
                        sent = len(output.text)
        except ValueError as error:
            failed = _response(request, "failed") | {"error": {"code": "server_error", "message": str(error)}}
            await send("response.failed", response=failed)
            return await stream.close(b"")
        assert output is not None
        if sent:
            item["content"] = [_part(output.text)]
            await send("response.output_text.done", text=output.text, logprobs=[], **place)
            await send("response.content_part.done", part=_part(output.text), **place)
            await send("response.output_item.done", item=item, output_index=0)
        response = self._completed(request, output, item if sent else None)
        self._store(request, response)
        await send(f"response.{response['status']}", response=response)
        return await stream.close(b"")

    def _completed(
        self, request: ResponsesRequest, output: Output, item: dict[str, Any] | None
    ) -> dict[str, Any]:
        reason = output.sequence.finish_reason
        cut = reason is not None and reason["type"] == "length"
        prompt_tokens = len(output.sequence.prompt)
        usage = {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": output.sequence.cached_tokens if self._cache_report else 0,
                "cache_write_tokens": 0,
            },
            "output_tokens": output.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + output.tokens,
        }
        return _response(request, "incomplete" if cut else "completed") | {
            "output": [item] if item else [],
            "usage": usage,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "text": request.text or ({"format": {"type": "text"}} if item else None),
        }


async def _read(http: web.Request) -> ResponsesRequest:
    """The request. Raises RefusedError if it is invalid."""
    try:
        return await read_body(http, ResponsesRequest)
    except BadBodyError as error:
        raise _refused(str(error), kind="Bad Request") from error


def _refused(
    message: str, *, status: int = 400, param: str | None = None, kind: str = "invalid_request_error"
) -> RefusedError:
    error = {"message": message, "type": kind, "param": param, "code": status}
    return RefusedError(message, json_response({"error": error}, status))


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


_TOOL_DEFAULTS: dict[str, Any] = dict.fromkeys(
    ("name", "description", "parameters", "tools", "defer_loading", "format")
) | {"strict": False}


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
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_choice": request.tool_choice,
        "tools": [_TOOL_DEFAULTS | tool for tool in request.tools],
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": (request.reasoning or {}).get("effort"), "summary": None},
        "store": request.store,
        "temperature": request.temperature,
        "text": request.text,
        "top_p": request.top_p,
        "truncation": request.truncation,
        "user": request.user,
        "metadata": request.metadata or {},
    }
