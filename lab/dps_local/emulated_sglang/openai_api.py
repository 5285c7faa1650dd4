"""/v1/chat/completions and /v1/completions, with the fields and the stream chunks of SGLang 0.5.23."""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from aiohttp import web

from dps_local.emulated_sglang.answer import Event, Form, accepted_drafts, answer, cached_tokens_details
from dps_local.emulated_sglang.driver import Engine, EngineRequest, Output
from dps_local.emulated_sglang.http import (
    RefusedError,
    error_object,
    error_response,
    off_loop_if_long,
    read_body,
)
from dps_local.emulated_sglang.protocol import (
    ChatRequest,
    CompletionRequest,
    MediaPart,
    OpenAIRequest,
)


async def chat(engine: Engine, http: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    request = await read_body(http, ChatRequest)
    if problem := problem_of_chat(request):
        raise _refused(problem)
    try:
        prompt = await off_loop_if_long(http, engine.prompts.encode_chat, request.body)
    except ValueError as error:
        raise _refused(str(error), "BadRequest") from error
    requests = requests_of(request, [prompt])
    return await answer(http, engine, requests, request.stream, _ChatForm(request, engine))


async def completions(engine: Engine, http: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    request = await read_body(http, CompletionRequest)
    prompts, batched = await off_loop_if_long(http, engine.prompts.encode_inputs, request.prompt)
    if not all(prompts) or not prompts:
        raise _refused("Prompt cannot be empty")
    echoes = [""] * len(prompts)
    if request.echo:
        texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        echoes = [
            text if isinstance(text, str) else engine.prompts.decode(list(prompt))
            for text, prompt in zip(texts, prompts, strict=False)
        ]
    form = _CompletionForm(request, engine, echoes)
    requests = requests_of(request, prompts, batched=batched)
    return await answer(http, engine, requests, request.stream, form)


async def converted_chat(
    http: web.Request,
    engine: Engine,
    convert: Callable[[dict[str, Any]], dict[str, Any]],
    body: dict[str, Any],
    fields: Mapping[str, Any],
) -> tuple[ChatRequest, tuple[int, ...]]:
    """The chat request, with these fields, to which a request of another API is converted, and its prompt.

    Raises ValueError.
    """
    try:
        chat = ChatRequest.model_validate(convert(body) | dict(fields))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
    if problem := problem_of_chat(chat):
        raise ValueError(problem)
    return chat, await off_loop_if_long(http, engine.prompts.encode_chat, chat.body)


def problem_of_chat(request: ChatRequest) -> str | None:
    """The message with which a chat request is refused, or None."""
    if not request.messages:
        return "Messages cannot be empty."
    for message in request.messages:
        for part in message.content if isinstance(message.content, list) else ():
            if isinstance(part, MediaPart):
                kind = "audio_url" if part.type == "input_audio" else part.type
                return f"Model only supports text input; received unsupported content type '{kind}'."
    return None


def requests_of(
    request: OpenAIRequest, prompts: Sequence[tuple[int, ...]], *, batched: bool = False
) -> list[EngineRequest]:
    """The engine's requests for these prompts. Raises RefusedError if there is not one cache salt for each."""
    try:
        namespaces = request.namespaces(len(prompts), batch=batched or request.n > 1)
    except ValueError as error:
        raise _refused(str(error)) from error
    params, rid = request.sampling(), request.rid if len(prompts) == 1 else None
    return [
        EngineRequest(prompt, params, rid, space) for prompt, space in zip(prompts, namespaces, strict=True)
    ]


class _Form(Form):
    """What chats and completions have in common."""

    kind: str
    chunk_kind: str

    def __init__(self, request: OpenAIRequest, engine: Engine) -> None:
        super().__init__(engine)
        self._request = request
        self._created = int(time.time())

    def failed(self, message: str, status: int) -> Iterable[Event]:
        if status == HTTPStatus.BAD_REQUEST:
            raise self.refused(message, status)
        return [{"error": error_object(message, HTTPStatus(status).name, status)}]

    def refused(self, message: str, status: int) -> RefusedError:
        kind = "BadRequestError" if status == HTTPStatus.BAD_REQUEST else str(status)
        return RefusedError(message, error_response(message, kind, status))

    def whole(self, finals: Sequence[Output]) -> Event:
        choices = [self._choice(output) | _ending(output) for output in finals]
        usage = {"usage": self._usage(finals)}
        return self._envelope(self.kind, finals[0], choices) | usage | self._extension(finals)

    def end(self) -> Iterable[Event]:
        """Chunks with `sglext` and the usage, if the request asks for them."""
        outputs = [self.last[choice] for choice in sorted(self.last)]
        chunk = self._envelope(self.chunk_kind, outputs[-1], [])
        if extension := self._extension(outputs):
            yield chunk | {"usage": None} | extension
        if self._request.include_usage:
            yield chunk | {"usage": self._final_usage(outputs)}

    @abstractmethod
    def _choice(self, output: Output) -> dict[str, Any]:
        """The part of a choice that has its text."""

    def _final_usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        return self._usage(outputs)

    def _envelope(self, kind: str, output: Output, choices: list[dict[str, Any]]) -> Event:
        return {
            "id": output.sequence.rid,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }

    def _extension(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """The field `sglext` with the details that the request asks for, if there are any."""
        details: dict[str, Any] = {}
        if self._request.return_cached_tokens_details:
            details["cached_tokens_details"] = cached_tokens_details(outputs[0].sequence, self._engine)
        if self._request.return_spec_tokens_details:
            unused = {"spec_cap_length": 0.0, "spec_block_accept_length": 0.0, "spec_cap_lens_histogram": []}
            drafts = [unused | found for each in outputs if (found := accepted_drafts(each, self._engine))]
            details["spec_tokens_details"] = (
                (drafts if self._request.n > 1 else drafts[0]) if drafts else None
            )
        details = {name: value for name, value in details.items() if value is not None}
        return {"sglext": details} if details else {}

    def _usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        """Usage of several choices. A prompt counts once for its `n` choices."""
        prompts = outputs[:: self._request.n]
        prompt_tokens = sum(output.sequence.prompt_tokens for output in prompts)
        completion_tokens = sum(output.tokens for output in outputs)
        cached = {"cached_tokens": sum(map(self.cached_tokens, prompts))}
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": cached if self._engine.settings.enable_cache_report else None,
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        }


class _ChatForm(_Form):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def _choice(self, output: Output) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "reasoning_content": None}
        return {"index": output.choice, "message": message}

    def part(self, output: Output) -> Iterable[Event]:
        if output.choice not in self.last:
            yield self._chunk(output, {"role": "assistant", "content": ""}, _UNFINISHED)
        if text := self.new_text(output):
            usage = {"usage": self._usage([output])} if self._request.continuous_usage else {}
            yield self._chunk(output, {"content": text}, _UNFINISHED) | usage

    def end(self) -> Iterable[Event]:
        for output in self.last.values():
            yield self._chunk(output, {}, _ending(output))
        yield from super().end()

    def _chunk(self, output: Output, delta: dict[str, Any], ending: dict[str, Any]) -> Event:
        choice = {"index": output.choice, "delta": {"reasoning_content": None, **delta}, **ending}
        return self._envelope(self.chunk_kind, output, [choice])


class _CompletionForm(_Form):
    kind = chunk_kind = "text_completion"

    def __init__(self, request: CompletionRequest, engine: Engine, echoes: list[str]) -> None:
        super().__init__(request, engine)
        self._echoes = echoes

    def _choice(self, output: Output) -> dict[str, Any]:
        return {"index": output.choice, "text": self._echo(output) + output.text}

    def part(self, output: Output) -> Iterable[Event]:
        echo = "" if output.choice in self.last else self._echo(output)
        choice = {"index": output.choice, "text": echo + self.new_text(output), **_ending(output)}
        usage = self._usage([output]) if self._request.continuous_usage else None
        yield self._envelope(self.chunk_kind, output, [choice]) | {"usage": usage}

    def _final_usage(self, outputs: Sequence[Output]) -> dict[str, Any]:
        return {key: value for key, value in self._usage(outputs).items() if value is not None}

    def _echo(self, output: Output) -> str:
        return self._echoes[output.choice // self._request.n]


_UNFINISHED: dict[str, Any] = {"logprobs": None, "finish_reason": None, "matched_stop": None}


def _ending(output: Output) -> dict[str, Any]:
    """The fields that describe how a choice finished; null while it is unfinished."""
    reason = output.sequence.finish_reason if output.finished else None
    if reason is None:
        return _UNFINISHED
    return {"logprobs": None, "finish_reason": reason["type"], "matched_stop": reason.get("matched")}


def _refused(message: str, kind: str = "BadRequestError") -> RefusedError:
    return RefusedError(message, error_response(message, kind))
