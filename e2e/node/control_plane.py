"""The API server of a cluster on this machine: taken away and brought back."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "kube-apiserver"
LONGEST_END = 30.0
START = 'log=$1 pid=$2; shift 2; setsid nohup "$@" >>"$log" 2>&1 </dev/null & echo $! >"$pid"'
"""As `up` starts everything: with no parent that would have to wait for it."""


@contextmanager
def api_server_away(state: Path) -> Iterator[None]:
    """The API server is killed, and started again by its own command line when the block ends.

    state: the folder of the cluster that `up` made. etcd stays. Does not wait until it serves again.
    """
    pid = int((state / "pids" / NAME).read_text())
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    environment = dict(
        entry.split("=", 1) for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in entry
    )
    if NAME not in command[0]:
        raise RuntimeError(f"process {pid} is {command[0]}, not {NAME}")
    os.kill(pid, signal.SIGKILL)
    _until_gone(pid)
    try:
        yield
    finally:
        files = [str(state / "log" / f"{NAME}.log"), str(state / "pids" / NAME)]
        subprocess.run(
            ["bash", "-c", START, "start", *files, *command], env=environment, check=True, timeout=60
        )


def _until_gone(pid: int) -> None:
    """Wait until a process has ended: its port is free then."""
    limit = time.monotonic() + LONGEST_END
    stat = Path(f"/proc/{pid}/stat")
    while time.monotonic() < limit:
        try:
            if stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.1)
    raise RuntimeError(f"process {pid} did not end within {LONGEST_END:.0f} s")
