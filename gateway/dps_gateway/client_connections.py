"""The connections of clients: their number, and which of them to close.

A client that sends its request slowly, or never, would otherwise occupy a connection indefinitely, and connections
without a limit would exhaust the file descriptors that the gateway needs to reach engines.
"""

import asyncio
import resource
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

EXPIRE_SECONDS: Final = 1.0

RESERVED_FILES: Final = 64
"""File descriptors for everything but clients and engines: ports, Redis, logs, discovery, health checks."""

ADMIN_CONNECTIONS: Final = 128
"""Maximum number of connections to the admin port of one process. Each other gateway process opens at most
`PEER_CONNECTIONS` (session/peers.py); probes, Prometheus and the operator need a few more."""

ADMIN_SHARE: Final = 8
"""The connections to the admin port may need at most this part (an eighth) of the file descriptors."""

ADMIN_KEEP_ALIVE_SECONDS: Final = 300.0
"""Time for which an unused connection to the admin port is kept open. Prometheus closes them after five minutes."""

FILES_PER_CONNECTION: Final = 3
"""A client's connection, the connection to an engine for its request, and an idle pooled one to another engine."""


class Connection(Protocol):
    """A client's connection."""

    def drop(self) -> None:
        """Close the connection immediately."""


class ClientConnections:
    """The open connections, grouped by what they wait for. This class performs no I/O; it reads a clock.

    `max_connections`, `header_seconds` and `keep_alive_seconds` are functions, because they can be reloaded.
    `on_closed` is called with the reason for each connection that is closed or refused.
    """

    def __init__(
        self,
        max_connections: Callable[[], int],
        header_seconds: Callable[[], float],
        keep_alive_seconds: Callable[[], float],
        on_closed: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_connections = max_connections
        self._header_seconds = header_seconds
        self._keep_alive_seconds = keep_alive_seconds
        self._on_closed = on_closed
        self._clock = clock
        self._reading: OrderedDict[Connection, float] = OrderedDict()
        """Connections that are new, or on which part of a request's head has arrived, and since when."""
        self._idle: OrderedDict[Connection, float] = OrderedDict()
        """Connections that have been answered and are kept for another request, and since when."""
        self._busy: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._reading) + len(self._idle) + len(self._busy)

    @property
    def burst(self) -> int:
        """How many connections may be opened at the same time without closing one whose request is arriving."""
        return max(1, self._max_connections() // 4)

    def opened(self, connection: Connection) -> bool:
        """Record a new connection. Returns False if it must be refused.

        If there are too many, one that is not in use is closed in favour of the new one.
        """
        if len(self) >= self._max_connections() and not self._close_longest_waiting():
            self._on_closed("refused")
            return False
        self._reading[connection] = self._clock()
        return True

    def received(self, connection: Connection) -> None:
        """Record that bytes have arrived, which may be part of a request's head."""
        if self._idle.pop(connection, None) is not None:
            self._reading[connection] = self._clock()

    def began(self, connection: Connection) -> None:
        """Record that the head of a request is complete."""
        self.closed(connection)
        self._busy.add(connection)

    def ended(self, connection: Connection) -> None:
        """Record that a request has been served."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = self._clock()

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._reading.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def expire(self) -> None:
        """Close the connections on which the head of a request, or another request, has not arrived in time."""
        now = self._clock()
        for waiting, limit_seconds, reason in (
            (self._reading, self._header_seconds(), "timeout"),
            (self._idle, self._keep_alive_seconds(), "idle"),
        ):
            while waiting and next(iter(waiting.values())) <= now - limit_seconds:
                self._close(waiting, reason)

    def _close_longest_waiting(self) -> bool:
        """Close a connection that is not in use, preferably one on which no request has arrived."""
        waiting = self._reading or self._idle
        if not waiting:
            return False
        self._close(waiting, "evicted")
        return True

    def _close(self, waiting: OrderedDict[Connection, float], reason: str) -> None:
        connection, _ = waiting.popitem(last=False)
        self._on_closed(reason)
        connection.drop()


async def expire_periodically(*ports: ClientConnections) -> None:
    """Close the connections of each port whose requests do not arrive, until cancelled."""
    while True:
        await asyncio.sleep(EXPIRE_SECONDS)
        for connections in ports:
            connections.expire()


def raise_file_limit() -> None:
    """Raise this process's limit on open files to the maximum that the system permits."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connections_of_files() -> int:
    """The number of client connections for which this process has enough file descriptors."""
    files = _files()
    if files is None:
        return sys.maxsize
    return max(1, (files - RESERVED_FILES - admin_connections()) // FILES_PER_CONNECTION)


def admin_connections() -> int:
    """The maximum number of connections to the admin port of this process."""
    files = _files()
    if files is None:
        return ADMIN_CONNECTIONS
    return min(ADMIN_CONNECTIONS, max(1, (files - RESERVED_FILES) // ADMIN_SHARE))


def _files() -> int | None:
    """The number of files that this process may open. None if there is no limit."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if files == resource.RLIM_INFINITY else files
