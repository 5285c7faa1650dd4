"""The listening sockets, and what the HTTP server logs of requests that it cannot parse."""

import logging
import socket
from contextlib import suppress
from typing import Final

from aiohttp.http import HttpProcessingError

BACKLOG: Final = 1024
"""Connections to a port that may wait until they are accepted."""

_PROBES: Final = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A connection on which nothing is sent is closed if the client acknowledges neither a probe after 30 s nor three more,
sent every 10 s."""

_MAX_OPTION: Final = 2**31 - 1


def listening_sockets(
    host: str, port: int, idle_seconds: float, *, reuse_port: bool = False
) -> list[socket.socket]:
    """Sockets that listen on all addresses of `host`. Raises OSError.

    idle_seconds: the time after which a client is lost that acknowledges nothing. Without it, an engine would go on
    generating for such a client, until the buffers of the connection are full or, on Linux, for a quarter of an hour.
    reuse_port: whether other processes may listen on the port as well.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # Linux copies these options to the connections that the sockets accept.
    options = {**_PROBES, "TCP_USER_TIMEOUT": round(min(1000 * idle_seconds, _MAX_OPTION))}
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            listening = socket.create_server(address, family=family, backlog=BACKLOG, reuse_port=reuse_port)
            sockets.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                if (option := getattr(socket, name, None)) is not None:  # not on every system
                    with suppress(OSError):
                        listening.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError:
        for listening in sockets:
            listening.close()
        raise
    return sockets


class _WithoutContent(logging.Filter):
    """Removes the malformed part of a request, which aiohttp quotes, from the log: it may be an API key."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "malformed request: %s", (type(error).__name__,)
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def server_log() -> logging.Logger:
    """The logger of an HTTP server."""
    log = logging.getLogger("dps_gateway.http")
    if not log.filters:
        log.addFilter(_WithoutContent())
    return log
