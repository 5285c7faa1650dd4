"""Child processes: waiting until they are ready, errors when they fail, and cleanup."""

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dps_local.processes import Child, ChildError, next_free_ports

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


async def test_killed_process_can_be_restarted(tmp_path: Path) -> None:
    process = child(tmp_path, SLEEP)
    pids = []
    for _ in range(2):
        process.start()
        await process.wait_ready()
        pids.append(process.pid)
        process.kill()
    assert pids[0] != pids[1]
    with pytest.raises(ChildError, match="thing is not running"):
        _ = process.pid


async def test_stop_kills_a_process_that_ignores_sigterm(tmp_path: Path) -> None:
    async def ignores_sigterm() -> bool:
        return "ignoring" in process.tail()

    program = f"import signal; signal.signal(15, signal.SIG_IGN); print('ignoring', flush=True); {SLEEP}"
    process = Child("thing", [sys.executable, "-c", program], tmp_path / "thing.log", ignores_sigterm)
    process.start()
    await process.wait_ready()
    await process.stop(seconds=0.0)
    with pytest.raises(ChildError):
        process.signal(signal.SIGTERM)


FORKS = f"""
import socket, subprocess, sys, time
held = "import socket, sys, time; held = socket.create_connection(('127.0.0.1', int(sys.argv[1]))); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", held, sys.argv[1]])
{SLEEP}
"""
"""Leaves a child process behind when it is terminated, as SGLang does while it loads a model."""


@pytest.mark.parametrize("how", ["stop", "kill"])
@pytest.mark.parametrize("exits", [False, True], ids=["running", "exited"])
async def test_descendants_are_killed_with_the_process(tmp_path: Path, how: str, exits: bool) -> None:
    """The grandchild holds a connection to this test, which closes when it dies.

    If the main process of an SGLang server exits unexpectedly, its other processes may still hold GPU memory.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)
        process = child(tmp_path, FORKS.removesuffix(f"{SLEEP}\n") if exits else FORKS, ready=False)
        process.command.append(str(server.getsockname()[1]))
        process.start()
        connection, _ = await asyncio.to_thread(server.accept)
        with connection:
            connection.settimeout(60.0)
            if exits:
                with pytest.raises(ChildError, match="exited with status 0"):
                    await process.wait_ready()
            if how == "stop":
                await process.stop()
            else:
                process.kill()
            assert await asyncio.to_thread(connection.recv, 1) == b""


async def test_environment_variables_are_passed_to_the_process(tmp_path: Path) -> None:
    async def has_printed() -> bool:
        return process.tail() == "  thing| value"

    command = [sys.executable, "-c", f"import os; print(os.environ['DPS_X'], flush=True); {SLEEP}"]
    process = Child("thing", command, tmp_path / "log", has_printed, {"DPS_X": "value"})
    process.start()
    await process.wait_ready()
    await process.stop()


async def test_early_exit_is_an_error_with_the_end_of_the_log(tmp_path: Path) -> None:
    process = child(tmp_path, "print('first'); print('last'); raise SystemExit(3)", ready=False)
    process.start()
    with pytest.raises(ChildError) as caught:
        await process.wait_ready()
    assert str(caught.value) == "thing exited with status 3\n  thing| first\n  thing| last"


async def test_process_that_does_not_become_ready_is_an_error(tmp_path: Path) -> None:
    process = child(tmp_path, SLEEP, ready=False)
    process.start()
    with pytest.raises(ChildError, match="thing was not ready within 0 s"):
        await process.wait_ready(seconds=0.0)
    process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG exists only on Linux")
def test_child_dies_with_its_parent(tmp_path: Path) -> None:
    """The child holds a connection to this test, which closes when the child dies. Its parent is killed."""
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


def test_next_free_ports_are_consecutive_and_skip_those_that_are_taken() -> None:
    first = next_free_ports(20_000, 3)
    with socket.create_server(("127.0.0.1", first + 4)):
        assert next_free_ports(first + 3, 2) > first + 4
