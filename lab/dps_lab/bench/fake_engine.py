"""A fake engine that answers immediately with fixed content, so that a benchmark measures the router.

It does not emulate an engine; `dps engine` does. It has the features that cost a router time: keep-alive
connections, streams whose chunks are written one by one in separate iterations of the event loop, and a usage
block. The id of every answer contains the monotonic time in nanoseconds at which the request's first byte arrived.
The prompt length in `usage` is the request's `seed`, and the answer has `max_tokens` chunks.
"""

import argparse
import asyncio
import json
import re
import time
from collections.abc import Iterator
from itertools import repeat
from typing import Final, cast

import uvloop

from dps_gateway.api.listener import Listener
from dps_lab.bench.traffic import CHUNKS, MODEL, PATH
from dps_lab.bench.wire import RequestReader, chunk

_ID: Final = re.compile(rb'"id":"fake-(\d{20})"')
_STREAM: Final = re.compile(rb'"stream"\s*:\s*true')
_INCLUDE_USAGE: Final = re.compile(rb'"include_usage"\s*:\s*true')
_MAX_TOKENS: Final = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_PROMPT_TOKENS: Final = re.compile(rb'"seed"\s*:\s*(\d+)')
_LAST: Final = b"0\r\n\r\n"
_SSE_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_INFO: Final = {
    "model_path": MODEL,
    "tokenizer_path": MODEL,
    "served_model_name": MODEL,
    "is_generation": True,
    "version": "fake",
    "tp_size": 1,
    "dp_size": 1,
}
_STATIC: Final[dict[str, object]] = {
    "/health": {},
    "/v1/models": {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "owned_by": "dps-bench-fake", "max_model_len": 32768}],
    },
    "/get_model_info": _INFO,
    "/model_info": _INFO,
    "/get_server_info": _INFO,
    "/server_info": _INFO,
}


def arrived_at(body: bytes) -> int:
    """The arrival time of the request that `body` answers, in monotonic nanoseconds, read from the id.

    Raises ValueError if `body` is not an answer of the fake engine.
    """
    found = _ID.search(body)
    if found is None:
        raise ValueError(f"not an answer of the fake engine: {body[:200]!r}")
    return int(found[1])


def is_whole(body: bytes, stream: bool, chunks: int = CHUNKS) -> bool:
    """Whether `body` is a complete answer of the fake engine to a request without `include_usage`."""
    if stream:
        return body.count(b"data: ") == chunks + 1 and body.endswith(b"data: [DONE]\n\n")
    return body.endswith(b"}") and b'"completion_tokens":%d' % chunks in body


def completion(request: bytes, arrived: int) -> bytes:
    """The body of an answer without streaming."""
    answer = {
        "id": f"fake-{arrived:020d}",
        "object": "chat.completion",
        "created": 1_760_000_000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "word " * _chunks(request)},
                "finish_reason": "stop",
            }
        ],
        "usage": _usage(request),
    }
    return json.dumps(answer, separators=(",", ":")).encode()


def events(request: bytes, arrived: int) -> Iterator[bytes]:
    """The events of a streamed answer: those with content, one with usage if requested, and `[DONE]`."""
    yield from repeat(_EVENT % (arrived, b'{"content":"word "}', b"null"), _chunks(request) - 1)
    yield _EVENT % (arrived, b'{"content":"word "}', b'"stop"')
    if _INCLUDE_USAGE.search(request):
        yield _USAGE_EVENT % (arrived, json.dumps(_usage(request), separators=(",", ":")).encode())
    yield b"data: [DONE]\n\n"


_PREFIX: Final = (
    b'data: {"id":"fake-%020d","object":"chat.completion.chunk","created":1760000000,"model":"'
    + MODEL.encode()
)
_EVENT: Final = (
    _PREFIX + b'","choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}],"usage":null}\n\n'
)
_USAGE_EVENT: Final = _PREFIX + b'","choices":[],"usage":%b}\n\n'


def _usage(request: bytes) -> dict[str, int]:
    found = _PROMPT_TOKENS.search(request)
    prompt, chunks = int(found[1]) if found else 0, _chunks(request)
    return {"prompt_tokens": prompt, "completion_tokens": chunks, "total_tokens": prompt + chunks}


def _chunks(request: bytes) -> int:
    found = _MAX_TOKENS.search(request)
    return int(found[1]) if found else CHUNKS


class FakeEngine(asyncio.Protocol):
    """One connection. It answers requests one after the other; clients do not pipeline."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader()
        self._arrived = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transport is not a subclass of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._arrived = self._arrived or time.monotonic_ns()
        for request in self._reader.feed(data):
            arrived, self._arrived = self._arrived, 0
            if request.method == "GET":
                self._non_streaming(json.dumps(_STATIC.get(request.path, {})).encode())
            elif request.path != PATH:
                self._non_streaming(b"{}", status=b"404 Not Found")
            elif _STREAM.search(request.body):
                self._next(iter([*events(request.body, arrived)]), _SSE_HEAD)
            else:
                self._non_streaming(completion(request.body, arrived))

    def _non_streaming(self, body: bytes, status: bytes = b"200 OK") -> None:
        self._write(
            b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )

    def _next(self, rest: Iterator[bytes], before: bytes = b"") -> None:
        event = next(rest)
        if event == b"data: [DONE]\n\n":
            self._write(chunk(event) + _LAST)
        else:
            self._write(before + chunk(event))
            self._loop.call_soon(self._next, rest)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


async def serve(ports: list[int]) -> None:
    """Listen on each of `ports` of 127.0.0.1, one engine per port, until cancelled."""
    for port in ports:
        await Listener.listen(FakeEngine, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


def main() -> None:
    """`python -m dps_lab.bench.fake_engine PORT ...`"""
    parser = argparse.ArgumentParser(description="Fake engines for the benchmark, one per port.")
    parser.add_argument("ports", type=int, nargs="+", metavar="PORT")
    uvloop.run(serve(parser.parse_args().ports))


if __name__ == "__main__":
    main()
