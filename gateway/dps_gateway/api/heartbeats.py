"""Heartbeats: events without content that keep the connection of a streaming request open while nothing else is sent.

Clients and load balancers close connections on which nothing arrives for some time, often 60 seconds.
"""

import asyncio
from typing import Final, Self

from aiohttp import web

from dps_gateway.api.call import Call

HEADERS: Final = {"Content-Type": "text/event-stream"}


class Heartbeats:
    """Sends `event` after every timeouts.heartbeatSeconds in which nothing else has been sent, until the block ends.

    The first one also sends the headers, with status 200, if the answer has not begun. Without `event`, none is sent.
    """

    def __init__(self, call: Call, event: bytes) -> None:
        self._call = call
        self._event = event
        self._seconds = call.runtime.config.timeouts.heartbeat_seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        if self._event and self._seconds:
            self._timer = self._loop.call_later(self._seconds, self._check)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    def _check(self) -> None:
        """Send a heartbeat if it is due.

        A single timer, which is set again when it expires, costs less than a timer for each write.
        """
        due = self._call.written_at + self._seconds
        if self._loop.time() >= due:
            self._sending = self._loop.create_task(self._send())
            due = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(due, self._check)

    async def _send(self) -> None:
        call = self._call
        try:
            if call.response is None:
                # Another attempt may still move the request to another pool.
                await call.start(web.StreamResponse(headers=HEADERS), without=("x-dps-pool", "x-dps-reason"))
            between_events = call.events is None or not call.events.within_event
            if between_events and not call.writing:
                await call.write(self._event)
        except ConnectionResetError:  # the handler is cancelled as well
            pass
