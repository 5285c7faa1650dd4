"""Sends one turn through the `openai` SDK, as an agent does, and retries it until the answer is complete.

The SDK's own retries are disabled, so that every attempt is counted.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx2
import openai
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from dps_lab.replay.records import Verdict

FIRST_WAIT = 0.1
LONGEST_WAIT = 2.0
CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 30.0
"""Read timeout between two bytes of an answer."""


class Truncated(Exception):
    """An answer ended early."""


@dataclass(frozen=True)
class Attempt:
    """One request.

    verdict: the decision in the response headers; None if the request failed before they arrived.
    error: None for a complete answer.
    event: whether the error was an event in the stream, which the gateway sends when an engine is lost.
    """

    verdict: Verdict | None = None
    error: str | None = None
    event: bool = False


@dataclass
class Turn:
    """One turn with all its attempts. Times are in seconds; `began` is on the monotonic clock."""

    streamed: bool
    began: float
    attempts: list[Attempt] = field(default_factory=list)
    answer: str = ""
    prompt_tokens: int | None = None
    """L as reported by the engine."""
    latency: float = 0.0
    lost: str | None = None
    """Describes the session state that was lost; None if none was."""

    @property
    def verdict(self) -> Verdict | None:
        """The decision of the first attempt with response headers.

        Later attempts are ignored: if the first one committed the prompt, their ΔL is 0.
        """
        return next((attempt.verdict for attempt in self.attempts if attempt.verdict is not None), None)

    @property
    def failed(self) -> bool:
        """Whether no attempt returned a complete answer."""
        return self.attempts[-1].error is not None


class _Body(httpx2.AsyncByteStream):
    """A response body that keeps its last bytes, because the SDK does not report whether `[DONE]` arrived."""

    def __init__(self, body: httpx2.AsyncByteStream) -> None:
        self.tail = b""
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._body:
            self.tail = (self.tail + chunk)[-64:]
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()


class _Transport(httpx2.AsyncHTTPTransport):
    """A transport that keeps the response headers, which the SDK drops if the body is incomplete."""

    verdict: Verdict | None = None
    body: _Body | None = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.verdict = self.body = None
        response = await super().handle_async_request(request)
        if response.status_code == 200:
            self.verdict = Verdict.of(response.headers)
            if isinstance(response.stream, httpx2.AsyncByteStream):
                self.body = response.stream = _Body(response.stream)
        return response


class Client:
    """An agent with its own SDK client and connections, which sends one turn at a time.

    keep_alive: whether turns reuse a connection and therefore, behind a Service, a replica.
    """

    def __init__(
        self, base_url: str, model: str, answer_tokens: int, attempts: int, *, keep_alive: bool
    ) -> None:
        self._model = model
        self._answer_tokens = answer_tokens
        self._attempts = attempts
        limits = httpx2.Limits(max_keepalive_connections=None if keep_alive else 0)
        self._transport = _Transport(limits=limits, verify=False)  # plain HTTP: skip loading certificates
        self._openai = openai.AsyncOpenAI(
            base_url=base_url,
            api_key="none",
            max_retries=0,
            timeout=openai.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
            http_client=openai.DefaultAsyncHttpxClient(transport=self._transport),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._openai.close()

    async def send(
        self, messages: list[ChatCompletionMessageParam], session_id: str | None, *, stream: bool
    ) -> Turn:
        """Send one turn until the answer is complete or the maximum number of attempts is reached."""
        turn = Turn(stream, time.monotonic())
        options: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._answer_tokens,
            "extra_body": {"ignore_eos": True},
            "extra_headers": {} if session_id is None else {"x-session-id": session_id},
        }
        wait = FIRST_WAIT
        while True:
            turn.attempts.append(await self._attempt(turn, options))
            if not turn.failed or len(turn.attempts) == self._attempts:
                break
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)
        turn.latency = time.monotonic() - turn.began
        return turn

    async def _attempt(self, turn: Turn, options: dict[str, Any]) -> Attempt:
        self._transport.verdict = None
        error: str | None = None
        event = False
        try:
            usage = await (self._streamed if turn.streamed else self._whole)(turn, options)
            turn.prompt_tokens = usage.prompt_tokens
        except openai.APIStatusError as status_error:
            error = f"status {status_error.status_code}: {status_error.message}"
        except openai.APIConnectionError as connection_error:
            error = f"{connection_error.message} ({connection_error.__cause__!r})"
        except openai.APIError as stream_error:
            error, event = f"error event: {stream_error.message}", True
        except Truncated as truncated:
            error = f"truncated: {truncated}"
        return Attempt(self._transport.verdict, error, event)

    async def _whole(self, turn: Turn, options: dict[str, Any]) -> CompletionUsage:
        answer: ChatCompletion = await self._openai.chat.completions.create(**options, stream=False)
        if not answer.choices or answer.choices[0].finish_reason is None or answer.usage is None:
            raise Truncated(f"no finish_reason or no usage: {answer}")
        turn.answer = answer.choices[0].message.content or ""
        return answer.usage

    async def _streamed(self, turn: Turn, options: dict[str, Any]) -> CompletionUsage:
        text = ""
        reason: str | None = None
        usage: CompletionUsage | None = None
        stream: openai.AsyncStream[ChatCompletionChunk] = await self._openai.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
        async with stream:
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    reason = choice.finish_reason or reason
        if self._transport.body is None or b"data: [DONE]" not in self._transport.body.tail:
            raise Truncated("the stream ended without [DONE]")
        if reason is None or usage is None:
            raise Truncated("the stream ended without a finish_reason, or without usage")
        turn.answer = text
        return usage
