"""A fake engine that answers immediately with fixed content, so that a benchmark measures the router.

It does not emulate an engine; `dps engine` does. It has the features that cost a router time: keep-alive
connections, streams whose chunks are written one by one in separate iterations of the event loop, and a usage
block. The prompt length in `usage` is the request's `seed`.
"""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from typing import Final, cast

import uvloop

from dps_lab.bench.traffic import MODEL, PATH
from dps_lab.bench.wire import MessageReader, chunk

CHUNKS: Final = 32
"""Content chunks of a streamed answer, and tokens of every answer."""

_STREAM: Final = re.compile(rb'"stream"\s*:\s*true')
_INCLUDE_USAGE: Final = re.compile(rb'"include_usage"\s*:\s*true')
_PROMPT_TOKENS: Final = re.compile(rb'"seed"\s*:\s*(\d+)')
_DONE: Final = b"data: [DONE]\n\n"
_SSE_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_INFO: Final = {"model_path": MODEL, "tokenizer_path": MODEL, "served_model_name": MODEL, "version": "fake"}
_STATIC: Final[dict[str, object]] = {
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 32768}]},
    "/get_model_info": _INFO,
    "/model_info": _INFO,
    "/get_server_info": _INFO,
    "/server_info": _INFO,
}


def is_whole(body: bytes, stream: bool) -> bool:
    """Whether `body` has the complete content of the fake engine's answer; LiteLLM adds events and fields to it."""
    if stream:
        return body.count(b'"word "') == CHUNKS and body.endswith(_DONE)
    return body.endswith(b"}") and body.count(b"word ") == CHUNKS


def completion(request: bytes) -> bytes:
    """The body of an answer without streaming."""
    message = {"role": "assistant", "content": "word " * CHUNKS}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return _object("chat.completion", choices, _usage(request))


def events(request: bytes) -> Iterator[bytes]:
    """The events of a streamed answer: those with content, one with usage if requested, and `[DONE]`."""
    for number in range(CHUNKS):
        yield _LAST_EVENT if number == CHUNKS - 1 else _EVENT
    if _INCLUDE_USAGE.search(request):
        yield b"data: %b\n\n" % _object("chat.completion.chunk", [], _usage(request))
    yield _DONE


def _object(kind: str, choices: list[dict[str, object]], usage: dict[str, int] | None) -> bytes:
    answer = {
        "id": "fake",
        "object": kind,
        "created": 1_760_000_000,
        "model": MODEL,
        "choices": choices,
        "usage": usage,
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def _event(reason: str | None) -> bytes:
    choice: dict[str, object] = {"index": 0, "delta": {"content": "word "}, "finish_reason": reason}
    return b"data: %b\n\n" % _object("chat.completion.chunk", [choice], None)


_EVENT: Final = _event(None)
_LAST_EVENT: Final = _event("stop")


def _usage(request: bytes) -> dict[str, int]:
    found = _PROMPT_TOKENS.search(request)
    prompt = int(found[1]) if found else 0
    return {"prompt_tokens": prompt, "completion_tokens": CHUNKS, "total_tokens": prompt + CHUNKS}


class FakeEngine(asyncio.Protocol):
    """One connection. It answers requests one after the other; clients do not pipeline."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = MessageReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transport is not a subclass of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        request = self._reader.feed(data)
        if request is None:
            return
        method, path, _ = request.head.split(b" ", 2)
        if method == b"GET":
            self._answer(json.dumps(_STATIC.get(path.decode(), {})).encode())
        elif path.decode() != PATH:
            self._answer(b"{}", status=b"404 Not Found")
        elif _STREAM.search(request.body):
            self._next(events(request.body), _SSE_HEAD)
        else:
            self._answer(completion(request.body))

    def _answer(self, body: bytes, status: bytes = b"200 OK") -> None:
        self._write(
            b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )

    def _next(self, rest: Iterator[bytes], before: bytes = b"") -> None:
        event = next(rest)
        if event is _DONE:
            self._write(chunk(event) + b"0\r\n\r\n")
        else:
            self._write(before + chunk(event))
            self._loop.call_soon(self._next, rest)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def serve(ports: list[int]) -> None:
    """Listen on each of `ports` of 127.0.0.1, one engine per port, until cancelled."""
    for port in ports:
        await asyncio.get_running_loop().create_server(FakeEngine, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
