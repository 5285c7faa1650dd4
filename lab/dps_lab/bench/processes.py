"""The benchmark's processes, each pinned to a core, and their CPU usage."""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class StartError(Exception):
    """A process of the benchmark did not start. The message contains the end of its output."""


@contextmanager
def running(
    command: Sequence[str], core: int, ready: str | None, log: Path, patience: float = 90
) -> Iterator[int]:
    """Run `command` on the one `core` within the context, and yield its process id. Its output goes to `log`.

    ready: a URL to poll before the context is entered, until it returns status 200. Raises StartError if that
    takes longer than `patience` seconds or if the process exits.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(os.sched_setaffinity, 0, {core}),
        )
    try:
        if ready is not None:
            _wait(process, ready, log, patience)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-2000:]
            raise StartError(f"{' '.join(map(str, process.args))} is not ready:\n{tail}")  # type: ignore[arg-type]
        time.sleep(0.1)


def cpu_seconds(pid: int) -> float:
    """User and system CPU time of a process and its descendants, including exited threads.

    It is the sum of fields 14 and 15 of /proc/PID/stat (proc(5)) over the process tree. The resolution is one clock
    tick, usually 10 ms, so short runs cannot be measured.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) * _TICK
    return own + sum(cpu_seconds(child) for child in _children(pid))


def resident_bytes(pid: int) -> int:
    """The resident memory of a process and its descendants, where shared pages count once for each process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * _PAGE + sum(resident_bytes(child) for child in _children(pid))


def core_seconds(core: int) -> float:
    """The busy time of a core, including steal time of other virtual machines; from /proc/stat."""
    line = next(
        line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} ")
    )
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) * _TICK


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += map(int, (task / "children").read_text().split())
    return children
