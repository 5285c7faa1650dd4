"""One turn through the `openai` SDK, as an agent sends it, and again until there is a whole answer.

The SDK's own retries are off: each attempt is this module's, so that it is counted.
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
CONNECT_SECONDS = 2.0
SILENCE_SECONDS = 30.0
"""An answer that is silent for so long is an answer that does not come."""


class Truncated(Exception):
    """An answer came to an end that is not its end."""


@dataclass(frozen=True)
class Attempt:
    """One request. verdict: None if it broke before its headers came. error: None for a whole answer.

    event: the error was an event in the stream, as the gateway tells that an engine was lost.
    """

    verdict: Verdict | None = None
    error: str | None = None
    event: bool = False


@dataclass
class Turn:
    """One turn with all its attempts. Seconds; `began` is the monotonic clock's."""

    streamed: bool
    began: float
    attempts: list[Attempt] = field(default_factory=list)
    answer: str = ""
    prompt_tokens: int | None = None
    """L as the engine counted it."""
    latency: float = 0.0
    lost: str | None = None
    """What of its session was forgotten, if anything was."""

    @property
    def verdict(self) -> Verdict | None:
        """The decision that counts: the first whose headers came. A later one is of a prompt seen before."""
        return next((one.verdict for one in self.attempts if one.verdict is not None), None)

    @property
    def failed(self) -> bool:
        """Whether no attempt brought a whole answer."""
        return self.attempts[-1].error is not None


class _Body(httpx2.AsyncByteStream):
    """A response's body that remembers its last bytes: the SDK does not tell whether it saw `[DONE]`."""

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
    """The SDK's transport, watched: a response's headers are here even if its body breaks."""

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
    """An agent with an SDK client, and so with connections, of its own. One turn at a time.

    keep_alive: whether turns reuse a connection, and with it, behind a Service, a replica.
    """

    def __init__(
        self, base_url: str, model: str, answer_tokens: int, attempts: int, *, keep_alive: bool
    ) -> None:
        self._model = model
        self._answer_tokens = answer_tokens
        self._attempts = attempts
        limits = httpx2.Limits(max_keepalive_connections=None if keep_alive else 0)
        self._transport = _Transport(limits=limits, verify=False)  # it is HTTP: no certificates to load
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
        """Send one turn until there is a whole answer, or as often as this client does at most."""
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
        except openai.APIStatusError as refused:
            error = f"status {refused.status_code}: {refused.message}"
        except openai.APIConnectionError as broken:
            error = f"{broken.message} ({broken.__cause__!r})"
        except openai.APIError as told:
            error, event = f"error event: {told.message}", True
        except Truncated as short:
            error = f"truncated: {short}"
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
