"""Accepting connections: bursts, failures and TLS."""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

from dps_gateway.api import listener
from dps_gateway.api.listener import MIN_HANDSHAKES, Listener
from dps_testkit.certificates import certify

CONNECTIONS = 40


class Clients:
    """The connections that were accepted."""

    def __init__(self) -> None:
        self.transports: list[asyncio.BaseTransport] = []
        self.connected = asyncio.Event()

    def __call__(self) -> asyncio.Protocol:
        clients = self

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                clients.transports.append(transport)
                clients.connected.set()

        return Accepted()

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine on one kind of event loop."""
    runner: Callable[[Coroutine[Any, Any, None]], None] = request.param
    return runner


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(opened: ExitStack, listening: Listener, number: int = 1) -> None:
    """Open connections, which the kernel keeps until they are accepted."""
    for _ in range(number):
        address = listening.sockets[0].getsockname()[:2]
        opened.enter_context(socket.create_connection(address))


async def until(condition: Callable[[], bool], iterations: int) -> bool:
    """Whether the condition is true after at most so many iterations of the event loop."""
    for _ in range(iterations):
        if condition():
            return True
        await asyncio.sleep(0)
    return condition()


def test_connections_are_accepted_although_the_idle_timeout_exceeds_the_greatest_of_the_system(
    run: Callable[[Coroutine[Any, Any, None]], None], opened: ExitStack
) -> None:
    async def accept() -> None:
        clients = Clients()
        listening = await Listener.listen(clients, "127.0.0.1", 0, backlog=1, idle_seconds=lambda: 1e306)
        connect(opened, listening)
        assert await until(lambda: bool(clients.transports), 10)
        clients.close()
        listening.close()

    run(accept())


def test_burst_of_connections_is_accepted_in_few_iterations(
    run: Callable[[Coroutine[Any, Any, None]], None], opened: ExitStack
) -> None:
    async def burst() -> None:
        clients = Clients()
        listening = await Listener.listen(clients, "127.0.0.1", 0, backlog=CONNECTIONS)
        connect(opened, listening, CONNECTIONS)
        assert await until(lambda: len(clients.transports) == CONNECTIONS, iterations=CONNECTIONS // 4)
        listening.close()
        clients.close()

    run(burst())


def test_no_more_connections_are_accepted_at_once_than_the_server_can_take(
    run: Callable[[Coroutine[Any, Any, None]], None], opened: ExitStack
) -> None:
    async def burst() -> None:
        clients = Clients()
        listening = await Listener.listen(clients, "127.0.0.1", 0, backlog=CONNECTIONS, burst=lambda: 1)
        connect(opened, listening, CONNECTIONS)
        assert not await until(lambda: len(clients.transports) == CONNECTIONS, iterations=CONNECTIONS // 4)
        listening.close()
        await asyncio.sleep(0.05)
        clients.close()

    run(burst())


def test_closed_listener_refuses_connections(
    run: Callable[[Coroutine[Any, Any, None]], None], opened: ExitStack
) -> None:
    async def close() -> None:
        listening = await Listener.listen(asyncio.Protocol, "127.0.0.1", 0, backlog=1)
        address = listening.sockets[0].getsockname()
        listening.close()
        listening.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)

    run(close())


def test_all_addresses_of_a_host_are_listened_on(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def listen() -> None:
        listening = await Listener.listen(asyncio.Protocol, None, 0, backlog=1)
        addresses = {each.getsockname()[0] for each in listening.sockets}
        listening.close()
        assert "0.0.0.0" in addresses

    run(listen())


class FullSocket(socket.socket):
    """A listening socket that cannot accept its first connection."""

    failures = 1

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENFILE, "too many open files in system")
        return super().accept()


def test_connection_that_could_not_be_accepted_is_accepted_later(
    run: Callable[[Coroutine[Any, Any, None]], None],
    opened: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(listener, "PAUSE_SECONDS", 0.01)

    async def recover() -> None:
        clients = Clients()
        full = opened.enter_context(FullSocket())
        full.bind(("127.0.0.1", 0))
        full.listen()
        full.setblocking(False)
        listening = Listener([full], clients, None, lambda: 1, lambda: 60.0)
        connect(opened, listening)
        async with asyncio.timeout(30):
            await clients.connected.wait()
        listening.close()
        clients.close()

    run(recover())
    assert [each.getMessage() for each in caplog.records if each.name == listener.__name__] == [
        f"no connection can be accepted for 0.01 s: [Errno {errno.ENFILE}] too many open files in system"
    ]


def test_clients_that_disappear_are_detected(
    run: Callable[[Coroutine[Any, Any, None]], None], opened: ExitStack
) -> None:
    async def accept() -> None:
        clients = Clients()
        listening = await Listener.listen(clients, "127.0.0.1", 0, backlog=1, idle_seconds=lambda: 7.0)
        connect(opened, listening)
        await until(lambda: len(clients.transports) == 1, iterations=100)
        connection = clients.transports[0].get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
        listening.close()
        clients.close()

    run(accept())


def test_handshakes_that_do_not_end_are_limited_in_number_and_time(
    run: Callable[[Coroutine[Any, Any, None]], None],
    opened: ExitStack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 0.5)
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certify(certificate, key)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))

    async def accept() -> None:
        before = len(os.listdir("/proc/self/fd"))
        clients = Clients()
        listening = await Listener.listen(
            clients, "127.0.0.1", 0, backlog=CONNECTIONS, tls=tls, burst=lambda: 1
        )
        connect(opened, listening, CONNECTIONS)
        await asyncio.sleep(0.2)
        accepted = len(os.listdir("/proc/self/fd")) - before - CONNECTIONS
        assert accepted < MIN_HANDSHAKES + 4  # and the listening socket
        port = listening.sockets[0].getsockname()[1]
        async with asyncio.timeout(20):
            _, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=trusting, server_hostname="localhost"
            )
            await clients.connected.wait()
        writer.close()
        listening.close()
        clients.close()

    run(accept())
