"""An OpenAI client that sends one turn, with retries, to one of several base URLs."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from dps_lab.replay.records import TurnRecord, Verdict
from dps_lab.replay.wire import Answer, BrokenAnswerError, read_stream, read_whole
from dps_lab.workload.sessions import Message, Session

RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
MAX_BACKOFF_SECONDS = 3.0
"""Longest wait between two attempts. It also limits the server's Retry-After."""


@dataclass(frozen=True)
class ReplayOptions:
    """The options of a replay.

    urls: base URLs, such as http://127.0.0.1:8000/v1. Turns go to them in rotation.
    answers: which answers become part of the history, the recorded ones or the model's.
    session_ids: whether requests have the header `x-session-id`.
    run: prefix of the session ids, so that a second run does not continue the sessions of the first.
    max_tokens: limit for turns that do not set one.
    extra_body: fields added to every request body.
    attempts: attempts per turn before it counts as lost.
    first_wait: seconds before the second attempt. It doubles with every further attempt.
    read_seconds: timeout between two reads of a response.
    """

    urls: Sequence[str]
    model: str
    stream: bool = True
    answers: Literal["recorded", "model"] = "recorded"
    session_ids: Literal["header", "none"] = "header"
    run: str = ""
    max_tokens: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    attempts: int = 12
    first_wait: float = 0.1
    read_seconds: float = 120.0


@dataclass
class _Progress:
    """The state of a turn while it is sent. `attempts` and `unacknowledged` are as in TurnRecord."""

    attempts: int = 0
    unacknowledged: int = 0
    status: int | None = None
    verdict: Verdict = field(default_factory=Verdict)
    first_token_at: float | None = None
    error: str | None = None
    retry_after: float | None = None

    def headers_received(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        if self.verdict == Verdict():
            self.verdict = Verdict.of(response.headers)

    def token_received(self) -> None:
        self.first_token_at = self.first_token_at or time.perf_counter()


class Client:
    """An OpenAI client for recorded sessions. The caller opens and closes the aiohttp session."""

    def __init__(self, http: aiohttp.ClientSession, options: ReplayOptions) -> None:
        if not options.urls:
            raise ValueError("at least one base URL is required")
        self._http = http
        self._options = options
        self._rotation: Iterator[str] = itertools.cycle(options.urls)
        self._began = time.perf_counter()

    async def send(
        self, session: Session, number: int, messages: Sequence[Message]
    ) -> tuple[TurnRecord, Message | None]:
        """Send turn `number` (from 1) with its complete message list. Returns its record and the answer.

        The answer is None if all attempts failed, or if a status was returned that is not retried.
        """
        body = self._body(session, number, messages)
        progress = _Progress()
        url = next(self._rotation)
        began = time.perf_counter()
        answer: Answer | None = None
        while True:
            progress.attempts += 1
            answer, retry = await self._attempt(url, session, body, progress)
            if answer is not None or not retry or progress.attempts == self._options.attempts:
                break
            await asyncio.sleep(self._backoff(progress))
            url = self._other_url(url)
        record = TurnRecord(
            session=session.id,
            turn=number,
            url=url,
            status=progress.status,
            verdict=progress.verdict,
            attempts=progress.attempts,
            unacknowledged=progress.unacknowledged,
            started=began - self._began,
            ttft=None if progress.first_token_at is None else progress.first_token_at - began,
            latency=time.perf_counter() - began,
            usage=(answer or Answer()).usage,
            error=None if answer is not None else progress.error,
        )
        return record, None if answer is None else answer.message()

    async def _attempt(
        self, url: str, session: Session, body: Mapping[str, Any], progress: _Progress
    ) -> tuple[Answer | None, bool]:
        """Send the request once. Returns the answer, or None and whether to retry."""
        progress.status = progress.retry_after = None
        try:
            async with self._http.post(
                f"{url.rstrip('/')}/chat/completions",
                json=body,
                headers=self._headers(session),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=5.0, sock_read=self._options.read_seconds
                ),
            ) as response:
                progress.headers_received(response)
                if response.status != 200:
                    text = await response.text()
                    progress.error = f"status {response.status}: {text[:300]}"
                    progress.retry_after = _seconds(response.headers.get("Retry-After"))
                    return None, response.status in RETRIED_STATUSES
                if self._options.stream:
                    return await read_stream(response, progress.token_received), False
                answer = await read_whole(response)
                progress.token_received()
                return answer, False
        except (aiohttp.ClientError, TimeoutError, ConnectionError, BrokenAnswerError) as error:
            progress.error = f"{type(error).__name__}: {error}"
            progress.unacknowledged += progress.verdict == Verdict()
            return None, True

    def _body(self, session: Session, number: int, messages: Sequence[Message]) -> dict[str, Any]:
        options = self._options
        body: dict[str, Any] = {"model": options.model, "messages": list(messages), "stream": options.stream}
        if session.tools:
            body["tools"] = session.tools
        if options.stream:
            body["stream_options"] = {"include_usage": True}
        if max_tokens := session.turns[number - 1].max_tokens or options.max_tokens:
            body["max_tokens"] = max_tokens
        return body | dict(options.extra_body)

    def _headers(self, session: Session) -> dict[str, str]:
        headers = {}
        if self._options.session_ids == "header":
            headers["x-session-id"] = f"{self._options.run}{session.id}"
        if self._options.api_key:
            headers["Authorization"] = f"Bearer {self._options.api_key}"
        return headers

    def _other_url(self, failed: str) -> str:
        others = (url for url in itertools.islice(self._rotation, len(self._options.urls)) if url != failed)
        return next(others, failed)

    def _backoff(self, progress: _Progress) -> float:
        wait = progress.retry_after
        if wait is None:
            wait = self._options.first_wait * 2 ** (progress.attempts - 1)
        return min(wait, MAX_BACKOFF_SECONDS)


def _seconds(value: str | None) -> float | None:
    return float(value) if value is not None and value.isdigit() else None
