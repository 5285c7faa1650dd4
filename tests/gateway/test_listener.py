"""The listening sockets of the public port and the admin port."""

import socket
from contextlib import closing

import pytest

from dps_gateway.app import listening_sockets

LONGEST = 2**31 - 1


@pytest.mark.parametrize(
    ("idle_seconds", "expected"),
    [(7.0, 7000), (1e9, LONGEST)],
    ids=["seconds", "longer than the system's maximum"],
)
def test_clients_that_disappear_are_detected(idle_seconds: float, expected: int) -> None:
    (listening,) = listening_sockets("127.0.0.1", 0, idle_seconds)
    with (
        closing(listening),
        closing(socket.create_connection(listening.getsockname())),
        closing(listening.accept()[0]) as accepted,
    ):
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == expected
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
