"""Several gateway processes on one port: SO_REUSEPORT distributes connections, and dead processes are replaced."""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from prometheus_client.multiprocess import mark_process_dead

from dps_gateway.shared_counts import MINUTES_SUFFIX, SUFFIX

RESPAWN_SECONDS = 1.0
CANNOT_START = 2
"""Exit status of a worker whose configuration or tokenizer cannot be used."""


SOCKETS = "DPS_WORKER_SOCKETS"
"""The environment variable that names the folder of the workers' Unix sockets and shared counts."""


def own_socket() -> Path | None:
    """The path of this process's Unix socket if it is one of several workers, else None."""
    folder = os.environ.get(SOCKETS)
    return Path(folder) / f"{os.getpid()}.sock" if folder and multiprocessing.parent_process() else None


def run_workers(count: int, work: Callable[..., None], *arguments: object) -> int:
    """Run `work(*arguments)` in `count` processes until SIGTERM or SIGINT, then let each of them drain.

    Returns the exit status: CANNOT_START if one of the initial processes cannot start. A replacement that cannot
    start is retried instead, because the other workers keep serving with the configuration they have loaded.
    """
    stopping, status = False, 0

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="dps-metrics-") as metrics,
        tempfile.TemporaryDirectory(prefix="dps-workers-") as sockets,
    ):
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics
        os.environ[SOCKETS] = sockets

        def start() -> BaseProcess:
            process = context.Process(target=work, args=arguments)
            process.start()
            return process

        initial = [start() for _ in range(count)]
        workers = list(initial)
        while not stopping:
            time.sleep(RESPAWN_SECONDS / 5)
            dead = [index for index, worker in enumerate(workers) if not worker.is_alive()]
            if any(workers[index] in initial and workers[index].exitcode == CANNOT_START for index in dead):
                stopping, status = True, CANNOT_START
            if not dead or stopping:
                continue
            for index in dead:
                pid = workers[index].pid
                mark_process_dead(pid)  # type: ignore[no-untyped-call]
                for suffix in (".sock", SUFFIX, MINUTES_SUFFIX):
                    (Path(sockets) / f"{pid}{suffix}").unlink(missing_ok=True)
            time.sleep(RESPAWN_SECONDS)
            if not stopping:  # no signal has arrived in the meantime
                for index in dead:
                    workers[index] = start()
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
    return status
