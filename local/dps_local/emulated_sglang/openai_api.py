"""/v1/chat/completions and /v1/completions, with the fields and the stream chunks of SGLang 0.5.23."""

import time
from contextlib import aclosing
from typing import Any

from aiohttp import web

from dps_local.emulated_sglang import results
from dps_local.emulated_sglang.driver import Engine, Output
from dps_local.emulated_sglang.generation import SamplingParams
from dps_local.emulated_sglang.http import (
    EventStream,
    error_response,
    json_response,
    off_loop_if_long,
    read_body,
)
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.protocol import (
    ChatRequest,
    CompletionRequest,
    MediaPart,
    OpenAIRequest,
    ToolChoice,
)
from dps_local.emulated_sglang.radix import Namespace


class OpenAIEndpoints:
    """The OpenAI endpoints of one engine."""

    def __init__(self, engine: Engine, prompts: Prompts, served_model_name: str, cache_report: bool) -> None:
        self._served_model_name = served_model_name
        self._engine = engine
        self._prompts = prompts
        self._cache_report = cache_report

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        request = await read_body(http, ChatRequest)
        if problem := self.problem_of_chat(request):
            return error_response(problem)
        try:
            prompt = await off_loop_if_long(http, self._prompts.encode_chat, request)
        except ValueError as error:
            return error_response(str(error), "BadRequest")
        params = request.sampling(request.longest_answer)
        try:
            spaces = request.namespaces(1, batch=request.n > 1)
            if request.stream:
                return await self._stream_chat(http, request, prompt, params, spaces)
            finals = await results.final_outputs(self._engine, [prompt], params, [request.rid], spaces)
        except ValueError as error:
            return error_response(str(error))
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "reasoning_content": None},
                **_ending(output),
            }
            for index, output in enumerate(finals)
        ]
        return self._whole(finals, request, "chat.completion", choices)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        request = await read_body(http, CompletionRequest)
        prompts, batched = await off_loop_if_long(http, self._prompts.encode_inputs, request.prompt)
        if not all(prompts) or not prompts:
            return error_response("Prompt cannot be empty")
        if problem := self._model_problem(request):
            return error_response(problem)
        echoes = self._echoes(request, prompts)
        params = request.sampling(request.max_tokens)
        rids = [request.rid] if len(prompts) == 1 else []
        try:
            spaces = request.namespaces(len(prompts), batch=batched or request.n > 1)
            if request.stream:
                return await self._stream_completions(http, request, prompts, params, echoes, spaces)
            finals = await results.final_outputs(self._engine, prompts, params, rids, spaces)
        except ValueError as error:
            return error_response(str(error))
        choices = [
            {"index": index, "text": echoes[index // request.n] + output.text, **_ending(output)}
            for index, output in enumerate(finals)
        ]
        return self._whole(finals, request, "text_completion", choices)

    def problem_of_chat(self, request: ChatRequest) -> str | None:
        """The message with which a chat request is refused, or None."""
        if not request.messages:
            return "Messages cannot be empty."
        for message in request.messages:
            for part in message.content if isinstance(message.content, list) else ():
                if isinstance(part, MediaPart):
                    kind = "audio_url" if part.type == "input_audio" else part.type
                    return f"Model only supports text input; received unsupported content type '{kind}'."
        names = [tool.function.name for tool in request.tools or []]
        if request.tool_choice == "required" and not names:
            return "Tools cannot be empty if tool choice is set to required."
        if isinstance(request.tool_choice, ToolChoice):
            if not names:
                return "Tools cannot be empty if tool choice is set to a specific tool."
            if request.tool_choice.function.name not in names:
                return f"Tool '{request.tool_choice.function.name}' not found in tools list."
        if "chat_template" in (request.chat_template_kwargs or {}):
            return (
                "Request-supplied chat_template is not allowed. Start the server with "
                "--trust-request-chat-template to permit it."
            )
        return self._model_problem(request)

    def _model_problem(self, request: OpenAIRequest) -> str | None:
        """Every model name is accepted, but `name:adapter` requests a LoRA adapter, which is not available."""
        _, _, adapter = request.model.partition(":")
        if not adapter or request.model == self._served_model_name:
            return None
        return (
            f"LoRA adapter '{adapter}' was requested, but LoRA is not enabled. Please launch the server with "
            "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint."
        )

    def _echoes(self, request: CompletionRequest, prompts: list[results.Prompt]) -> list[str]:
        if not request.echo:
            return [""] * len(prompts)
        texts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        return [
            text if isinstance(text, str) else self._prompts.decode(list(prompt))
            for text, prompt in zip(texts, prompts, strict=False)
        ]

    async def _stream_chat(
        self,
        http: web.Request,
        request: ChatRequest,
        prompt: results.Prompt,
        params: SamplingParams,
        spaces: list[Namespace],
    ) -> web.StreamResponse:
        stream = EventStream(http)
        created = int(time.time())
        sent: dict[int, int] = {}
        last: dict[int, Output] = {}

        async def send(
            rid: str, index: int, delta: dict[str, Any], ending: dict[str, Any], **extra: Any
        ) -> None:
            choice = {"index": index, "delta": {"reasoning_content": None, **delta}, **ending}
            await stream.send(_envelope(rid, "chat.completion.chunk", created, request, [choice]) | extra)

        unfinished = {"logprobs": None, "finish_reason": None, "matched_stop": None}
        outputs = results.outputs(self._engine, [prompt], params, True, [request.rid], spaces)
        async with aclosing(outputs) as run:
            async for index, output in run:
                rid = output.sequence.rid
                if index not in last:
                    await send(rid, index, {"role": "assistant", "content": ""}, unfinished)
                last[index] = output
                if delta := output.text[sent.get(index, 0) :]:
                    extra = {"usage": self._usage([output])} if request.continuous_usage else {}
                    await send(rid, index, {"content": delta}, unfinished, **extra)
                    sent[index] = len(output.text)
        for index, output in last.items():
            await send(rid, index, {}, _ending(output))
        return await self._finish(stream, last, request, "chat.completion.chunk", created, rid)

    async def _stream_completions(
        self,
        http: web.Request,
        request: CompletionRequest,
        prompts: list[results.Prompt],
        params: SamplingParams,
        echoes: list[str],
        spaces: list[Namespace],
    ) -> web.StreamResponse:
        stream = EventStream(http)
        created = int(time.time())
        sent: dict[int, int] = {}
        last: dict[int, Output] = {}
        outputs = results.outputs(self._engine, prompts, params, True, namespaces=spaces)
        async with aclosing(outputs) as run:
            async for index, output in run:
                echo = "" if index in last else echoes[index // request.n]
                last[index] = output
                delta = echo + output.text[sent.get(index, 0) :]
                sent[index] = len(output.text)
                choice = {"index": index, "text": delta, **_ending(output)}
                rid = output.sequence.rid
                chunk = _envelope(rid, "text_completion", created, request, [choice])
                await stream.send(
                    chunk | {"usage": self._usage([output]) if request.continuous_usage else None}
                )
        return await self._finish(stream, last, request, "text_completion", created, rid)

    async def _finish(
        self,
        stream: EventStream,
        last: dict[int, Output],
        request: OpenAIRequest,
        kind: str,
        created: int,
        rid: str,
    ) -> web.StreamResponse:
        """End a stream, after chunks with the sources of cached tokens and the usage if the request asks for them.

        last: the last output of each choice.
        """
        chunk = _envelope(rid, kind, created, request, [])
        if extension := self._extension(last[0], request):
            await stream.send(chunk | {"usage": None} | extension)
        if request.include_usage:
            usage = self._usage([last[index] for index in sorted(last)], request.n)
            if kind == "text_completion":
                usage = {key: value for key, value in usage.items() if value is not None}
            await stream.send(chunk | {"usage": usage})
        return await stream.close()

    def _whole(
        self, finals: list[Output], request: OpenAIRequest, kind: str, choices: list[dict[str, Any]]
    ) -> web.Response:
        envelope = _envelope(finals[0].sequence.rid, kind, int(time.time()), request, choices)
        versions = results.weight_versions(finals[0].tokens)
        metadata = {"weight_version": "default", "weight_versions": versions}
        tail = {"usage": self._usage(finals, request.n), "metadata": metadata}
        return json_response(envelope | tail | self._extension(finals[0], request))

    def _extension(self, output: Output, request: OpenAIRequest) -> dict[str, Any]:
        """The field `sglext` with the sources of the cached tokens, if the request asks for it and there are any."""
        details = results.cached_tokens_details(output.sequence, self._engine)
        if not request.return_cached_tokens_details or details is None:
            return {}
        return {"sglext": {"cached_tokens_details": details}}

    def _usage(self, outputs: list[Output], n: int = 1) -> dict[str, Any]:
        return results.usage(outputs, n, self._cache_report)


def _envelope(
    rid: str, kind: str, created: int, request: OpenAIRequest, choices: list[dict[str, Any]]
) -> dict[str, Any]:
    return {"id": rid, "object": kind, "created": created, "model": request.model, "choices": choices}


def _ending(output: Output) -> dict[str, Any]:
    """The fields that describe how a choice finished; null while it is unfinished."""
    reason = output.sequence.finish_reason if output.finished else None
    return {
        "logprobs": None,
        "finish_reason": reason and reason["type"],
        "matched_stop": reason and reason.get("matched"),
    }
