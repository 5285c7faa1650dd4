"""Accepting connections on a TCP port.

The servers of uvloop accept one connection per iteration of the event loop (libuv's pull request #3696). An iteration
takes long while the process relays many streams, so a burst of new connections would wait until the streams end.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Final, Self, cast

from aiohttp import web

from dps_gateway.config import Timeouts

log = logging.getLogger(__name__)

MAX_ACCEPTED: Final = 64
"""Connections that are accepted in one iteration of the event loop, which takes about 10 ms."""

HANDSHAKE_SECONDS: Final = 10.0
"""Time in which the TLS handshake of a new connection must be complete."""

MIN_HANDSHAKES: Final = 16
"""Handshakes that may be in progress at the same time even if the server accepts very few connections."""

HANDSHAKES_PAUSE_SECONDS: Final = 0.1
"""Time until the next attempt to accept a connection while too many handshakes are in progress."""

PAUSE_SECONDS: Final = 1.0
"""Time until the next attempt after a connection could not be accepted, for example because there is no memory."""

_PROBES: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A connection on which nothing is sent is closed if the client acknowledges neither a probe after 30 s nor three more,
sent every 10 s."""

_MAX_OPTION: Final = 2**31 - 1

Protocols = Callable[[], asyncio.BaseProtocol]


class Listener:
    """The listening sockets of one port, and the connections that are being accepted."""

    def __init__(
        self,
        sockets: list[socket.socket],
        protocols: Protocols,
        tls: ssl.SSLContext | None,
        burst: Callable[[], int],
        idle_seconds: Callable[[], float],
    ) -> None:
        self.sockets = sockets
        self._protocols = protocols
        self._tls = tls
        self._burst = burst
        self._idle_seconds = idle_seconds
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        for each in sockets:
            self._watch(each)

    @classmethod
    async def listen(
        cls,
        protocols: Protocols,
        host: str | None,
        port: int,
        *,
        backlog: int,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
        burst: Callable[[], int] = lambda: MAX_ACCEPTED,
        idle_seconds: Callable[[], float] = lambda: Timeouts().idle_seconds,
    ) -> Self:
        """Listen on all addresses of `host`, or of this machine if it is None. Raises OSError.

        burst: the connections that the server can take at the same time, of which at most MAX_ACCEPTED are accepted.
        idle_seconds: the time after which a client is lost that acknowledges nothing.
        """
        found = await asyncio.get_running_loop().getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with ExitStack() as opened:
            sockets = []
            for family, address in dict.fromkeys((each[0], each[4]) for each in found):
                listening = socket.create_server(
                    address, family=family, backlog=backlog, reuse_port=reuse_port
                )
                opened.callback(listening.close)
                listening.setblocking(False)
                sockets.append(listening)
            opened.pop_all()
        return cls(sockets, protocols, tls, burst, idle_seconds)

    def close(self) -> None:
        """Stop listening. Connections that have been accepted stay open."""
        for each in self.sockets:
            if each.fileno() >= 0:
                self._loop.remove_reader(each)
                each.close()

    def _watch(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """Accept the connections that wait, up to a limit."""
        room = self._room()
        if room <= 0:
            self._pause(listening, HANDSHAKES_PAUSE_SECONDS)
            return
        for _ in range(room):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be accepted for %g s: %s", PAUSE_SECONDS, error)
                self._pause(listening, PAUSE_SECONDS)
                return
            connection.setblocking(False)
            _detect_lost_clients(connection, self._idle_seconds())
            task = self._loop.create_task(self._connect(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _pause(self, listening: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listening)
        self._loop.call_later(seconds, self._watch, listening)

    def _room(self) -> int:
        """The connections that may be accepted now.

        The server counts a connection only once its TLS handshake is complete, so handshakes are limited here.
        """
        burst = min(MAX_ACCEPTED, self._burst())
        if self._tls is None:
            return burst
        return min(burst, max(MIN_HANDSHAKES, self._burst()) - len(self._tasks))

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocols,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if self._tls is not None else None,
            )
        except OSError as error:  # includes failures of the TLS handshake
            log.debug("a new connection failed: %s", error)


def _detect_lost_clients(connection: socket.socket, idle_seconds: float) -> None:
    """Have the system close the connection of a client that has disappeared without closing it.

    Otherwise an engine would go on generating for it, until the buffers of the connection are full or, on Linux, for a
    quarter of an hour.
    """
    options = {**_PROBES, "TCP_USER_TIMEOUT": round(min(1000 * idle_seconds, _MAX_OPTION))}
    with suppress(OSError):  # the client has closed the connection already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in options.items():
            if (option := getattr(socket, name, None)) is not None:  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Site(web.BaseSite):
    """Serves an application on a TCP port, like `web.TCPSite`."""

    def __init__(
        self,
        runner: web.BaseRunner,
        host: str | None,
        port: int,
        *,
        backlog: int,
        reuse_port: bool = False,
        tls: ssl.SSLContext | None = None,
        burst: Callable[[], int] = lambda: MAX_ACCEPTED,
        idle_seconds: Callable[[], float] = lambda: Timeouts().idle_seconds,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=backlog)
        self._host = host
        self._port = port
        self._reuse_port = reuse_port
        self._burst = burst
        self._idle_seconds = idle_seconds

    @property
    def name(self) -> str:
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://{self._host or '0.0.0.0'}:{self._port}"

    async def start(self) -> None:
        await super().start()
        assert self._runner.server is not None
        listener = await Listener.listen(
            self._runner.server,
            self._host,
            self._port,
            backlog=self._backlog,
            reuse_port=self._reuse_port,
            tls=self._ssl_context,
            burst=self._burst,
            idle_seconds=self._idle_seconds,
        )
        # A cast, because the base class uses only `close` and `sockets` of a server.
        self._server = cast(asyncio.AbstractServer, listener)
