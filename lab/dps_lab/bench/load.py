"""A closed-loop load generator: each connection sends its next request when the previous answer is complete."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

from dps_lab.bench.wire import MessageReader, WireError


@dataclass
class Load:
    """A run and its results. Times are in seconds of the monotonic clock.

    started: when all connections were open. stopped: when a connection had no more requests or the time limit was
    reached, after which the load drops. counted: requests completed until then. latencies: from sending each request to
    the last byte of its answer, including those in flight at `stopped`.
    """

    is_whole: Callable[[bytes], bool]
    seconds: float
    started: float = 0.0
    stopped: float | None = None
    counted: int = 0
    latencies: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Requests per second."""
        assert self.stopped is not None
        return self.counted / (self.stopped - self.started)

    @property
    def overdue(self) -> bool:
        """Whether the time limit is reached."""
        return time.monotonic() - self.started > self.seconds

    def stop(self) -> None:
        """Count the requests completed so far, if the load has not stopped before."""
        if self.stopped is None:
            self.stopped, self.counted = time.monotonic(), len(self.latencies)


class _Connection(asyncio.Protocol):
    """A keep-alive connection that sends its requests in order. `done` completes, or fails with the error."""

    def __init__(self, requests: Iterator[bytes], load: Load) -> None:
        self._requests = requests
        self._load = load
        self._reader = MessageReader()
        self._sent = 0.0
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, because uvloop's transport is not a subclass of asyncio.Transport.
        self._transport = cast(asyncio.Transport, transport)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            answer = self._reader.feed(data)
        except WireError as error:
            self._finish(error)
            return
        if answer is None:
            return
        self._load.latencies.append(time.monotonic() - self._sent)
        if b" 200 " in answer.head[:16] and self._load.is_whole(answer.body):
            self.send_next()
        else:
            self._finish(WireError(f"unexpected answer: {answer.head!r} {answer.body[-400:]!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc or WireError("the connection was closed before the answer was complete"))

    def send_next(self) -> None:
        """Send the next request, if there is one. Call this once all connections are open."""
        assert self._transport is not None
        request = None if self._load.overdue else next(self._requests, None)
        if request is None:
            self._load.stop()
            self._finish(None)
        else:
            self._sent = time.monotonic()
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
) -> Load:
    """Send `requests`, one sequence per connection, to 127.0.0.1:`port`, for at most `seconds`.

    Raises WireError if an answer does not have status 200 or does not satisfy `is_whole`.
    """
    loop = asyncio.get_running_loop()
    connections: list[_Connection] = []
    load = Load(is_whole, seconds)
    try:
        for sequence in requests:
            connection = _Connection(sequence, load)
            await loop.create_connection(lambda: connection, "127.0.0.1", port)  # noqa: B023 - called immediately
            connections.append(connection)
        load.started = time.monotonic()
        for connection in connections:
            connection.send_next()
        await asyncio.gather(*(connection.done for connection in connections))
    finally:
        for connection in connections:
            connection.close()
    return load
