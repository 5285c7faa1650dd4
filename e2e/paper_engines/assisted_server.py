"""An OpenAI-compatible server of chat completions over `assisted_generation`, on loopback.

    assisted_server.py --model TARGET --port PORT [--draft-model DRAFT]

It decodes greedily, and generates for one request at a time, in the order of arrival. Tools are part of the prompt;
calls remain text. A request for what it cannot do is refused with 400. It has /v1/models and /v1/chat/completions only.
"""

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from e2e.paper_engines.assisted_generation import AssistedModel, Drafting, Generated

MAX_BODY_BYTES = 64 << 20
UNSUPPORTED = ("stop", "response_format", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty")


class RefusedError(Exception):
    """The request needs something that the server does not support. The message states what."""


@dataclass
class Job:
    """A request that waits or generates. `steps` receives the text of every step, and at the end None."""

    generated: asyncio.Future[Generated]
    steps: asyncio.Queue[str | None]


class Server:
    """The endpoints for one model."""

    def __init__(self, model: AssistedModel, name: str) -> None:
        self._model = model
        self._name = name
        self._worker = ThreadPoolExecutor(max_workers=1)

    def application(self) -> web.Application:
        """The web application."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.add_routes(
            [web.get("/v1/models", self._models), web.post("/v1/chat/completions", self._chat)]
        )
        return application

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self._name, "object": "model", "created": 0, "owned_by": "transformers"}
        return web.json_response({"object": "list", "data": [card]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        try:
            prompt, max_tokens = self._checked(body)
        except RefusedError as error:
            return web.json_response({"error": {"message": str(error), "code": 400}}, status=400)
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._name}
        async with self._running(prompt, max_tokens) as job:
            if body.get("stream"):
                with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
                return await self._stream(request, head, len(prompt), job, with_usage=with_usage)
            text = "".join([step async for step in _texts(job)])
            generated = await job.generated
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": self._finish_reason(generated)}
        usage = _usage(len(prompt), generated)
        return web.json_response(head | {"object": "chat.completion", "choices": [choice], "usage": usage})

    def _checked(self, body: Mapping[str, Any]) -> tuple[list[int], int]:
        """The tokens of a request's prompt and the limit of its answer. Raises RefusedError."""
        unsupported = [field for field in UNSUPPORTED if body.get(field)]
        if unsupported:
            raise RefusedError(f"not supported: {', '.join(unsupported)}")
        if body.get("temperature") != 0 or body.get("n", 1) != 1:
            raise RefusedError(
                "only greedy decoding of one answer is supported: set temperature to 0 and n to 1"
            )
        prompt = self._model.prompt(body["messages"], body.get("tools"))
        room = self._model.context_length - len(prompt)
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens") or room
        if not 0 < max_tokens <= room:
            raise RefusedError(
                f"{len(prompt)} prompt tokens leave room for {max(0, room)} new ones, not {max_tokens}"
            )
        return prompt, max_tokens

    @asynccontextmanager
    async def _running(self, prompt: list[int], max_tokens: int) -> AsyncIterator[Job]:
        """Generate in the worker thread, at most until the block exits, as it does when the client leaves."""
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[str | None] = asyncio.Queue()
        left = False

        def emit(text: str | None) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, text)

        def work() -> Generated:
            try:
                if left:
                    return Generated((), 0, 0, 0)
                return self._model.generate(prompt, max_tokens, emit, lambda: left)
            finally:
                emit(None)

        try:
            yield Job(loop.run_in_executor(self._worker, work), steps)
        finally:
            left = True

    async def _stream(
        self, request: web.Request, head: Mapping[str, Any], prompt_tokens: int, job: Job, *, with_usage: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(choices: list[dict[str, Any]], **more: Any) -> None:
            chunk = {**head, "object": "chat.completion.chunk", "choices": choices, **more}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        await send([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        async for step in _texts(job):
            await send([{"index": 0, "delta": {"content": step}, "finish_reason": None}])
        generated = await job.generated
        await send([{"index": 0, "delta": {}, "finish_reason": self._finish_reason(generated)}])
        if with_usage:
            await send([], usage=_usage(prompt_tokens, generated))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _finish_reason(self, generated: Generated) -> str:
        return "stop" if generated.tokens[-1] in self._model.end_tokens else "length"


async def _texts(job: Job) -> AsyncIterator[str]:
    while (step := await job.steps.get()) is not None:
        yield step


def _usage(prompt_tokens: int, generated: Generated) -> dict[str, Any]:
    completion_tokens = len(generated.tokens)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": generated.accepted_tokens,
            "rejected_prediction_tokens": generated.rejected_tokens,
        },
    }


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(
        description="Serve greedy chat completions with Transformers on 127.0.0.1."
    )
    parser.add_argument("--model", type=Path, required=True, help="the target model's folder")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", default="default")
    parser.add_argument("--draft-model", type=Path, help="without it, the target model decodes alone")
    parser.add_argument(
        "--draft-tokens", type=int, default=20, help="the most tokens drafted per verification"
    )
    parser.add_argument("--confidence", type=float, default=0.4, help="drafting stops below this probability")
    options = parser.parse_args()
    drafting = None
    if options.draft_model is not None:
        drafting = Drafting(options.draft_model, options.draft_tokens, options.confidence)
    server = Server(AssistedModel(options.model, drafting), options.served_model_name)
    web.run_app(
        server.application(), host="127.0.0.1", port=options.port, handler_cancellation=True, print=None
    )


if __name__ == "__main__":
    main()
