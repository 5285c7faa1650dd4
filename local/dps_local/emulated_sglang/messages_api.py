"""/v1/messages and /v1/messages/count_tokens, Anthropic's Messages API, with the events of SGLang 0.5.23.

A request is converted to a chat request with the gateway's conversion, which is tested against SGLang's.
"""

import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from dps_gateway.prompt.messages import chat_request
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
from dps_local.emulated_sglang.protocol import ChatRequest, MaxTokens
from dps_sglang.cache_salt import SALT_HEADER

Request = TypeVar("Request", bound="CountRequest")
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


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
    stop_sequences: list[str] | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """The sampling fields of the chat request."""
        fields = {"temperature": self.temperature, "top_p": self.top_p, "stop": self.stop_sequences}
        return fields | {"max_tokens": self.max_tokens, "stream": bool(self.stream)}


class MessagesEndpoints:
    """The endpoints of Anthropic's Messages API of one engine."""

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        openai: OpenAIEndpoints,
        cache_report: bool,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._openai = openai
        self._cache_report = cache_report

    async def messages(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        request = await _read(http, MessagesRequest)
        chat, prompt = await self._chat(http, request, request.sampling_fields())
        if chat.stream:
            return await self._stream(http, chat, prompt)
        (output,) = await self._outputs(chat, prompt)
        message = {
            **_message(request.model),
            "content": [{"type": "text", "text": output.text}],
            "stop_reason": _stop_reason(output),
            "usage": self._prompt_usage(output) | {"output_tokens": output.tokens},
        }
        return json_response(message)

    async def count_tokens(self, http: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens."""
        _, prompt = await self._chat(http, await _read(http, CountRequest), {})
        return json_response({"input_tokens": len(prompt)})

    async def _chat(
        self, http: web.Request, request: CountRequest, fields: dict[str, Any]
    ) -> tuple[ChatRequest, results.Prompt]:
        """The chat request and its prompt. Raises RefusedError."""
        inline_system = self._prompts.renders_inline_system
        try:
            chat = chat_request(request.model_dump(), inline_system=inline_system, reasoning=False)
            # As SGLang with the plugin dps_sglang, which an engine needs if several tenants use it.
            salt = {"cache_salt": http.headers.get(SALT_HEADER)}
            converted = ChatRequest.model_validate(chat | fields | salt)
            if problem := self._openai.problem_of_chat(converted):
                raise _refused(problem)
            return converted, await off_loop_if_long(http, self._prompts.encode_chat, converted)
        except (AttributeError, KeyError, TypeError, ValidationError, ValueError) as error:
            raise _refused(str(error)) from error

    async def _outputs(self, chat: ChatRequest, prompt: results.Prompt) -> Sequence[Output]:
        params, spaces = chat.sampling(chat.longest_answer), chat.namespaces(1, batch=False)
        try:
            return await results.final_outputs(self._engine, [prompt], params, namespaces=spaces)
        except ValueError as error:
            raise _refused(str(error), "BadRequestError") from error

    async def _stream(
        self, http: web.Request, chat: ChatRequest, prompt: results.Prompt
    ) -> web.StreamResponse:
        stream = EventStream(http)

        async def send(kind: str, **fields: Any) -> None:
            await stream.send({"type": kind, **fields}, kind)

        async def start(usage: dict[str, Any]) -> None:
            await send(
                "message_start",
                message={**_message(chat.model), "content": [], "usage": usage | {"output_tokens": 0}},
            )

        sent = 0
        output: Output | None = None
        params, spaces = chat.sampling(chat.longest_answer), chat.namespaces(1, batch=False)
        try:
            outputs = results.outputs(self._engine, [prompt], params, True, namespaces=spaces)
            async with aclosing(outputs) as run:
                async for _, output in run:
                    if not sent and output.text:
                        await start(self._prompt_usage(output))
                        block = {"type": "text", "text": ""}
                        await send("content_block_start", index=0, content_block=block)
                    if delta := output.text[sent:]:
                        await send(
                            "content_block_delta", index=0, delta={"type": "text_delta", "text": delta}
                        )
                        sent = len(output.text)
        except ValueError as error:
            await start({"input_tokens": 0})
            await stream.send(_error(str(error), "invalid_request_error"), "error")
        else:
            assert output is not None
            if sent:
                await send("content_block_stop", index=0)
            else:
                await start(self._prompt_usage(output))
            ending = {"stop_reason": _stop_reason(output)}
            await send("message_delta", delta=ending, usage={"output_tokens": output.tokens})
        await send("message_stop")
        return await stream.close(b"")

    def _prompt_usage(self, output: Output) -> dict[str, int]:
        """Usage of the prompt, in which `input_tokens` excludes the cached tokens."""
        cached = output.sequence.cached_tokens if self._cache_report else 0
        usage = {"input_tokens": len(output.sequence.prompt) - cached}
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
