"""/v1/messages and /v1/messages/count_tokens, Anthropic's Messages API, with the events of SGLang 0.5.23.

A request is converted to a chat request with the gateway's conversion, which is tested against SGLang's.
"""

import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict

from dps_gateway.prompt.messages import chat_request
from dps_local.emulated_sglang.answer import Event, Form, answer
from dps_local.emulated_sglang.driver import Engine, Output
from dps_local.emulated_sglang.http import (
    BadBodyError,
    RefusedError,
    json_response,
    read_body,
)
from dps_local.emulated_sglang.openai_api import converted_chat, requests_of
from dps_local.emulated_sglang.protocol import ChatRequest, MaxTokens
from dps_sglang.cache_salt import SALT_HEADER

Request = TypeVar("Request", bound="CountRequest")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
OVERLOADED = "overloaded_error"


class CountRequest(BaseModel):
    """The fields of both endpoints. Fields for the prompt are kept as they are."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: list[dict[str, Any]]


class MessagesRequest(CountRequest):
    max_tokens: MaxTokens
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """The sampling fields of the chat request."""
        fields = {"temperature": self.temperature, "top_p": self.top_p}
        return fields | {"max_tokens": self.max_tokens, "stream": bool(self.stream)}


async def messages(engine: Engine, http: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    request = await _read(http, MessagesRequest)
    chat, prompt = await _chat(engine, http, request, request.sampling_fields())
    form = _Form(request.model, engine)
    return await answer(http, engine, requests_of(chat, [prompt]), chat.stream, form)


async def count_tokens(engine: Engine, http: web.Request) -> web.Response:
    """POST /v1/messages/count_tokens."""
    _, prompt = await _chat(engine, http, await _read(http, CountRequest), {})
    return json_response({"input_tokens": len(prompt)})


async def _chat(
    engine: Engine, http: web.Request, request: CountRequest, fields: dict[str, Any]
) -> tuple[ChatRequest, tuple[int, ...]]:
    """The chat request and its prompt. Raises RefusedError."""
    convert = partial(chat_request, inline_system=engine.prompts.renders_inline_system, reasoning=False)
    # As SGLang with the plugin dps_sglang, which an engine needs if several tenants use it.
    salt = {"cache_salt": http.headers.get(SALT_HEADER)}
    try:
        return await converted_chat(http, engine, convert, request.model_dump(), fields | salt)
    except ValueError as error:
        raise _refused(str(error)) from error


class _Form(Form):
    ending = b""
    named_events = True

    def __init__(self, model: str, engine: Engine) -> None:
        super().__init__(engine)
        self._model = model

    def whole(self, finals: Sequence[Output]) -> Event:
        (output,) = finals
        return {
            **_message(self._model),
            "content": [{"type": "text", "text": output.text}],
            "stop_reason": _stop_reason(output),
            "usage": self._prompt_usage(output) | {"output_tokens": output.tokens},
        }

    def part(self, output: Output) -> Iterable[Event]:
        text = self.new_text(output)
        if text and text == output.text:
            yield self._start(self._prompt_usage(output))
            yield {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            }
        if text:
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}

    def end(self) -> Iterable[Event]:
        output = self.last[0]
        if output.text:
            yield {"type": "content_block_stop", "index": 0}
        else:
            yield self._start(self._prompt_usage(output))
        usage = {"output_tokens": output.tokens}
        yield {"type": "message_delta", "delta": {"stop_reason": _stop_reason(output)}, "usage": usage}
        yield {"type": "message_stop"}

    def failed(self, message: str, status: int) -> Iterable[Event]:
        yield self._start({"input_tokens": 0})
        yield _error(message, "invalid_request_error" if status == HTTPStatus.BAD_REQUEST else OVERLOADED)
        yield {"type": "message_stop"}

    def refused(self, message: str, status: int) -> RefusedError:
        if status == HTTPStatus.BAD_REQUEST:
            return _refused(message, "BadRequestError")
        return RefusedError(message, json_response(_error("Internal server error", OVERLOADED), status))

    def _start(self, usage: dict[str, int]) -> Event:
        message = {**_message(self._model), "content": [], "usage": usage | {"output_tokens": 0}}
        return {"type": "message_start", "message": message}

    def _prompt_usage(self, output: Output) -> dict[str, int]:
        """Usage of the prompt, in which `input_tokens` excludes the cached tokens."""
        cached = self.cached_tokens(output)
        usage = {"input_tokens": output.sequence.prompt_tokens - cached}
        return usage | {"cache_read_input_tokens": cached} if cached else usage


async def _read(http: web.Request, model: type[Request]) -> Request:
    """The request. Raises RefusedError with SGLang's summary of the errors if it is invalid."""
    try:
        return await read_body(http, model)
    except BadBodyError as error:
        problems = [
            ".".join(str(part) for part in problem["loc"] if part != "body") + f": {problem['msg']}"
            for problem in error.problems
        ]
        raise _refused("; ".join(problems)) from error


def _refused(message: str, kind: str = "invalid_request_error") -> RefusedError:
    return RefusedError(message, json_response(_error(message, kind), 400))


def _message(model: str) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}


def _error(message: str, kind: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


def _stop_reason(output: Output) -> str:
    reason = output.sequence.finish_reason
    return STOP_REASONS.get(reason["type"] if reason else "stop", "end_turn")
