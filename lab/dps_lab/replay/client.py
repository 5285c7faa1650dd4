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
        began = time.perf_counter()
        record = TurnRecord(session.id, number, next(self._rotation), started=began - self._began)
        while True:
            record.attempts += 1
            outcome = await self._attempt(record, session, body, began)
            if not isinstance(outcome, float) or record.attempts == self._options.attempts:
                break
            await asyncio.sleep(min(outcome, MAX_BACKOFF_SECONDS))
            record.url = self._other_url(record.url)
        record.latency = time.perf_counter() - began
        if not isinstance(outcome, Answer):
            return record, None
        record.usage, record.error = outcome.usage, None
        return record, outcome.message()

    async def _attempt(
        self, record: TurnRecord, session: Session, body: Mapping[str, Any], began: float
    ) -> Answer | float | None:
        """Send the request once. Returns the answer, or the seconds to wait before it is repeated, or None."""

        def token_received() -> None:
            record.ttft = record.ttft or time.perf_counter() - began

        record.status = None
        wait = float(self._options.first_wait * 2 ** (record.attempts - 1))
        try:
            async with self._http.post(
                f"{record.url.rstrip('/')}/chat/completions",
                json=body,
                headers=self._headers(session),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=5.0, sock_read=self._options.read_seconds
                ),
            ) as response:
                record.status = response.status
                if record.verdict == Verdict():
                    record.verdict = Verdict.of(response.headers)
                if response.status != 200:
                    record.error = f"status {response.status}: {(await response.text())[:300]}"
                    retry_after = response.headers.get("Retry-After", "")
                    wait = float(retry_after) if retry_after.isdigit() else wait
                    return wait if response.status in RETRIED_STATUSES else None
                if self._options.stream:
                    return await read_stream(response, token_received)
                answer = await read_whole(response)
                token_received()
                return answer
        except (aiohttp.ClientError, TimeoutError, ConnectionError, BrokenAnswerError) as error:
            record.error = f"{type(error).__name__}: {error}"
            record.unacknowledged += record.verdict == Verdict()
            return wait

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
