"""A closed-loop load generator: each connection sends its next request when the previous answer is complete."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from dps_lab.bench.wire import ResponseReader, WireError


@dataclass(frozen=True)
class Load:
    """The results of one run. Times are in nanoseconds of the monotonic clock.

    counted: requests completed within `elapsed`.
    elapsed: time until a connection had no more requests or the time limit was reached, after which the load drops.
    sent, first, finished, bodies: one item per request, including those in flight when `elapsed` ended. `first` is
    the time of the answer's first byte. `bodies` is empty unless requested.
    """

    counted: int
    elapsed: int
    sent: list[int]
    first: list[int]
    finished: list[int]
    bodies: list[bytes]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.counted / self.elapsed * 1e9

    @property
    def latencies(self) -> list[int]:
        """Nanoseconds from sending each request to the last byte of its answer."""
        return [end - start for start, end in zip(self.sent, self.finished, strict=True)]

    @property
    def first_byte(self) -> list[int]:
        """Nanoseconds from sending each request to the first byte of its answer."""
        return [first - start for start, first in zip(self.sent, self.first, strict=True)]


class _Run:
    """State shared by the connections of a run: start, deadline and results."""

    def __init__(self, is_whole: Callable[[bytes], bool], nanoseconds: float, keep: bool) -> None:
        self.is_whole = is_whole
        self.keep = keep
        self.started = time.monotonic_ns()
        self.deadline = self.started + nanoseconds
        self.stopped: int | None = None
        self.counted = 0
        self.sent: list[int] = []
        self.first: list[int] = []
        self.finished: list[int] = []
        self.bodies: list[bytes] = []

    def stop(self, now: int) -> None:
        if self.stopped is None:
            self.stopped = now
            self.counted = len(self.finished)

    def answered(self, body: bytes, sent: int, first: int, now: int) -> None:
        if not self.is_whole(body):
            raise WireError(f"incomplete answer: {body[-400:]!r}")
        self.sent.append(sent)
        self.first.append(first)
        self.finished.append(now)
        if self.keep:
            self.bodies.append(body)
        if now > self.deadline:
            self.stop(now)


class _Connection(asyncio.Protocol):
    """A keep-alive connection that sends its requests in order. `done` completes, or fails with the error."""

    _run: _Run

    def __init__(self, requests: Iterator[bytes]) -> None:
        self._requests = requests
        self._reader = ResponseReader()
        self._sent = 0
        self._first = 0
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transport is not a subclass of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def start(self, run: _Run) -> None:
        """Send the first request. Call this once all connections are open."""
        self._run = run
        self._next(run.started)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._first = self._first or time.monotonic_ns()
        try:
            body = self._reader.feed(data)
            if body is not None:
                now = time.monotonic_ns()
                self._run.answered(body, self._sent, self._first, now)
                self._next(now)
        except WireError as error:
            self._finish(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc or WireError("the connection was closed before the answer was complete"))

    def _next(self, now: int) -> None:
        assert self._transport is not None
        if now > self._run.deadline:
            self._finish(None)
        elif (request := next(self._requests, None)) is None:
            self._run.stop(now)
            self._finish(None)
        else:
            self._sent, self._first = time.monotonic_ns(), 0
            self._transport.write(request)

    def _finish(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)


async def run_load(
    port: int,
    requests: list[Iterator[bytes]],
    is_whole: Callable[[bytes], bool],
    seconds: float = math.inf,
    keep: bool = False,
) -> Load:
    """Send `requests`, one sequence per connection, to 127.0.0.1:`port`, for at most `seconds`.

    keep: also return the answers' bodies. Raises WireError if an answer does not have status 200 or does not
    satisfy `is_whole`.
    """
    loop = asyncio.get_running_loop()
    connections: list[_Connection] = []
    try:
        for sequence in requests:
            connection = _Connection(sequence)
            await loop.create_connection(lambda: connection, "127.0.0.1", port)  # noqa: B023 - called immediately
            connections.append(connection)
        run = _Run(is_whole, seconds * 1e9, keep)
        for connection in connections:
            connection.start(run)
        await asyncio.gather(*(connection.done for connection in connections))
    finally:
        for connection in connections:
            connection.close()
    assert run.stopped is not None
    return Load(run.counted, run.stopped - run.started, run.sent, run.first, run.finished, run.bodies)
