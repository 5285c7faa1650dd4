"""Child processes: started, awaited until ready, stopped with all their descendants, and never left behind."""

import asyncio
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import aiohttp

POLL_SECONDS = 0.03
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
MAX_CLAIMS = 200
"""The number of claims of ports that a process holds. Servers have bound the ports that it received earlier."""
_claims: deque[int] = deque()
"""The file descriptors of the claims, oldest first."""


class ChildError(Exception):
    """A process is not running, or did not become ready. In the latter case the message contains the end of its log."""


class Child:
    """A process that can be restarted after it was killed. Its output is appended to a log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        ready: Callable[[], Awaitable[bool]],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """ready: polled by `wait_ready` until it returns True. environment: added to this process's environment."""
        self.name = name
        self.command = list(command)
        self.environment = dict(environment or {})
        self.log = log
        self._ready = ready
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id. Raises ChildError if the process is not running."""
        if self._process is None or self._has_exited(self._process):
            raise ChildError(f"{self.name} is not running")
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process was started and has exited. If it has, its descendants are killed."""
        return self._process is not None and self._has_exited(self._process)

    def start(self) -> None:
        """Start the process without waiting. It runs in a new process session, so Ctrl-C reaches only the parent."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    async def wait_ready(self, seconds: float = 90.0) -> None:
        """Wait until the process is ready. Raises ChildError if it exits first or takes longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while not await self._ready():
            if self._process is None or self._has_exited(self._process):
                status = None if self._process is None else self._process.returncode
                raise ChildError(f"{self.name} exited with status {status}\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ChildError(f"{self.name} was not ready within {seconds:.0f} s\n{self.tail()}")
            await asyncio.sleep(POLL_SECONDS)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Raises ChildError if the process is not running."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to the process and its descendants, and wait until it has exited."""
        if self._process is not None and not self._has_exited(self._process):
            self._kill_group(self._process.pid)
            self._process.wait()

    async def stop(self, seconds: float = 5.0) -> None:
        """Send SIGTERM, wait up to `seconds`, and send SIGKILL to whatever is left of its process group."""
        process = self._process
        if process is None or self._has_exited(process):
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, seconds)
        self._kill_group(process.pid)
        process.wait()

    def _has_exited(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether the process has exited. Descendants that it left behind are killed when this is first noticed.

        Later the id of its process group could belong to another group.
        """
        if process.returncode is None and process.poll() is not None:
            self._kill_group(process.pid)
        return process.returncode is not None

    @staticmethod
    def _kill_group(leader: int) -> None:
        with suppress(ProcessLookupError):  # the whole group has exited
            os.killpg(leader, signal.SIGKILL)

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log, each prefixed with the process's name."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(f"  {self.name}| {line}" for line in text.splitlines()[-lines:])


async def get_if_ok(url: str) -> bytes | None:
    """The body of a response with status 200; None if the request fails."""
    timeout = aiohttp.ClientTimeout(total=2.0)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(url) as response:
            return await response.read() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


async def is_ok(url: str) -> bool:
    """Whether a server responds to GET with status 200."""
    return await get_if_ok(url) is not None


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of 127.0.0.1 on which no process listens. Raises OSError if there are too few.

    They are below the ephemeral range, so that no outgoing connection can occupy one before the process binds it,
    or while the process is restarted. Other processes that use this function receive other ports.
    """
    candidates = random.SystemRandom().sample(range(10_240, _first_ephemeral_port()), 2_000)
    ports = list(islice(filter(_claim, candidates), count))
    if len(ports) < count:
        raise OSError(f"fewer than {count} free ports on 127.0.0.1")
    return ports


def next_free_ports(first: int, count: int) -> int:
    """The lowest port from `first` on with which `count` consecutive free TCP ports of 127.0.0.1 begin.

    Raises OSError if there are none. Other processes that use this function or `free_ports` receive other ports.
    """
    free = 0
    for port in range(first, _first_ephemeral_port()):
        free = free + 1 if _claim(port) else 0
        if free == count:
            return port - count + 1
    raise OSError(f"no {count} consecutive ports from {first} on are free on 127.0.0.1")


def _claim(port: int) -> bool:
    """Claim a port for this process. Returns False if a process listens on it, or another one has claimed it.

    A claim is an abstract Unix socket with a name that only one process can bind.
    """
    with socket.socket() as probe:
        # Connections that have ended do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    if sys.platform != "linux":
        return True
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0dps-router-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim.detach())
    if len(_claims) > MAX_CLAIMS:
        os.close(_claims.popleft())
    return True


def _first_ephemeral_port() -> int:
    try:
        return max(16_384, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    except OSError:
        return 32_768


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
