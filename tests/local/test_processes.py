"""Processes of our own: waited for, told about when they fail, and never left behind."""

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dps_local.processes import Child, ChildError, free_ports

SLEEP = "import time; time.sleep(600)"
PARENT = """
import pathlib, sys, time
from dps_local.processes import Child

async def ready() -> bool:
    return True

Child("thing", [sys.executable, "-c", sys.argv[1]], pathlib.Path(sys.argv[2]), ready).start()
time.sleep(600)
"""


def child(folder: Path, program: str, *, ready: bool = True) -> Child:
    async def is_ready() -> bool:
        return ready

    return Child("thing", [sys.executable, "-c", program], folder / "thing.log", is_ready)


async def test_a_process_can_be_killed_and_started_again(tmp_path: Path) -> None:
    process = child(tmp_path, SLEEP)
    pids = []
    for _ in range(2):
        process.start()
        await process.wait_ready()
        pids.append(process.pid)
        process.kill()
    assert pids[0] != pids[1]
    with pytest.raises(ChildError, match="thing does not run"):
        _ = process.pid


async def test_stop_terminates_and_kills_what_does_not_listen(tmp_path: Path) -> None:
    async def is_deaf() -> bool:
        return "deaf" in deaf.tail()

    program = f"import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"
    deaf = Child("thing", [sys.executable, "-c", program], tmp_path / "thing.log", is_deaf)
    deaf.start()
    await deaf.wait_ready()
    await deaf.stop(seconds=0.0)
    with pytest.raises(ChildError):
        deaf.signal(signal.SIGTERM)


FORKS = f"""
import socket, subprocess, sys, time
held = "import socket, sys, time; held = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", held, sys.argv[1]])
{SLEEP}
"""
"""Leaves a process of its own behind when it is terminated, as SGLang does while it loads."""


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_what_a_process_started_ends_with_it(tmp_path: Path, how: str) -> None:
    """The grandchild holds a connection to this test, which closes when it dies."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)
        process = child(tmp_path, FORKS)
        process.command.append(str(server.getsockname()[1]))
        process.start()
        connection, _ = await asyncio.to_thread(server.accept)
        with connection:
            connection.settimeout(60.0)
            if how == "stop":
                await process.stop()
            else:
                process.kill()
            assert await asyncio.to_thread(connection.recv, 1) == b""


async def test_a_process_finds_what_is_put_over_the_environment(tmp_path: Path) -> None:
    async def is_told() -> bool:
        return told.last_line() == "given"

    program = f"import os; print(os.environ['DPS_GIVEN'], flush=True); {SLEEP}"
    told = Child("thing", [sys.executable, "-c", program], tmp_path / "log", is_told, {"DPS_GIVEN": "given"})
    told.start()
    await told.wait_ready()
    await told.stop()


async def test_a_process_that_ends_early_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = child(tmp_path, "print('first'); print('last'); raise SystemExit(3)", ready=False)
    process.start()
    with pytest.raises(ChildError) as caught:
        await process.wait_ready()
    assert str(caught.value) == "thing ended with status 3\n  thing| first\n  thing| last"


async def test_a_process_that_never_gets_ready_is_told(tmp_path: Path) -> None:
    process = child(tmp_path, SLEEP, ready=False)
    process.start()
    with pytest.raises(ChildError, match="thing was not ready within 0 s"):
        await process.wait_ready(seconds=0.0)
    process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    """The child holds a connection to this test, which closes when it dies; its parent is killed with SIGKILL."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)
        port = server.getsockname()[1]
        program = f"import socket; held = socket.create_connection(('127.0.0.1', {port})); {SLEEP}"
        parent = subprocess.Popen([sys.executable, "-c", PARENT, program, str(tmp_path / "log")])
        connection, _ = server.accept()
        with connection:
            connection.settimeout(60.0)
            parent.kill()
            parent.wait()
            assert connection.recv(1) == b""


def test_free_ports_are_distinct() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
