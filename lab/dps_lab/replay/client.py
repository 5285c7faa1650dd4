"""Sends one turn to one of several base URLs, and again if it must, until there is a whole answer."""

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

RETRIED = frozenset({408, 429, 500, 502, 503, 504})
LONGEST_WAIT = 3.0
"""Seconds between two attempts at most, whatever the server's Retry-After says."""


@dataclass(frozen=True)
class ReplayOptions:
    """How turns are sent.

    urls: base URLs, such as http://127.0.0.1:8000/v1; turns go to them in rotation.
    answers: what the next turn's history contains, the recorded answers or the model's own.
    session_ids: whether each turn says to which session it belongs (`x-session-id`). run: put before each
    session's id, so that a second run has sessions of its own.
    max_tokens: for turns that do not say it themselves.
    extra_body: added to every request body. attempts: at one turn, before it counts as lost.
    first_wait: seconds before the second attempt; it doubles from one to the next.
    read_seconds: the longest silence within an answer.
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
class _Attempts:
    """What is known of a turn while it is being tried."""

    number: int = 0
    blind: int = 0
    status: int | None = None
    verdict: Verdict = field(default_factory=Verdict)
    first_token_at: float | None = None
    error: str | None = None
    retry_after: float | None = None

    def saw(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        if self.verdict == Verdict():
            self.verdict = Verdict.of(response.headers)

    def first_token(self) -> None:
        self.first_token_at = self.first_token_at or time.perf_counter()


class Client:
    """An OpenAI client for recorded sessions, on an aiohttp session that somebody else closes."""

    def __init__(self, http: aiohttp.ClientSession, options: ReplayOptions) -> None:
        if not options.urls:
            raise ValueError("at least one base URL is needed")
        self._http = http
        self._options = options
        self._rotation: Iterator[str] = itertools.cycle(options.urls)
        self._began = time.perf_counter()

    async def send(
        self, session: Session, number: int, messages: Sequence[Message]
    ) -> tuple[TurnRecord, Message | None]:
        """Send turn `number` (from 1) with its whole message list: what was seen, and the model's answer.

        The answer is None when there was none after all attempts, or after a refusal that would be repeated.
        """
        body = self._body(session, number, messages)
        seen = _Attempts()
        url = next(self._rotation)
        began = time.perf_counter()
        answer: Answer | None = None
        while True:
            seen.number += 1
            answer, again = await self._attempt(url, session, body, seen)
            if answer is not None or not again or seen.number == self._options.attempts:
                break
            await asyncio.sleep(self._wait(seen))
            url = self._another(url)
        record = TurnRecord(
            session=session.id,
            turn=number,
            url=url,
            status=seen.status,
            verdict=seen.verdict,
            attempts=seen.number,
            blind=seen.blind,
            started=began - self._began,
            ttft=None if seen.first_token_at is None else seen.first_token_at - began,
            latency=time.perf_counter() - began,
            usage=(answer or Answer()).usage,
            error=None if answer is not None else seen.error,
        )
        return record, None if answer is None else answer.message()

    async def _attempt(
        self, url: str, session: Session, body: Mapping[str, Any], seen: _Attempts
    ) -> tuple[Answer | None, bool]:
        """One attempt: the answer, or None and whether another attempt makes sense."""
        seen.status = seen.retry_after = None
        try:
            async with self._http.post(
                f"{url.rstrip('/')}/chat/completions",
                json=body,
                headers=self._headers(session),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=5.0, sock_read=self._options.read_seconds
                ),
            ) as response:
                seen.saw(response)
                if response.status != 200:
                    text = await response.text()
                    seen.error = f"status {response.status}: {text[:300]}"
                    seen.retry_after = _seconds(response.headers.get("Retry-After"))
                    return None, response.status in RETRIED
                if self._options.stream:
                    return await read_stream(response, seen.first_token), False
                answer = await read_whole(response)
                seen.first_token()
                return answer, False
        except (aiohttp.ClientError, TimeoutError, ConnectionError, BrokenAnswerError) as error:
            seen.error = f"{type(error).__name__}: {error}"
            seen.blind += seen.verdict == Verdict()
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

    def _another(self, failed: str) -> str:
        others = (url for url in itertools.islice(self._rotation, len(self._options.urls)) if url != failed)
        return next(others, failed)

    def _wait(self, seen: _Attempts) -> float:
        wait = (
            self._options.first_wait * 2 ** (seen.number - 1)
            if seen.retry_after is None
            else seen.retry_after
        )
        return min(wait, LONGEST_WAIT)


def _seconds(value: str | None) -> float | None:
    return float(value) if value is not None and value.isdigit() else None
