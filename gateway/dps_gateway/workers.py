"""Several gateway processes on one port (SO_REUSEPORT): the kernel spreads connections, a lost one is replaced."""

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from prometheus_client.multiprocess import mark_process_dead

RESPAWN_SECONDS = 1.0
CANNOT_START = 2
"""The exit status of a worker whose configuration or tokenizer cannot be used."""


def _worker(config_file: Path, log_level: str) -> None:
    import logging
    import sys

    logging.basicConfig(
        level=log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    from dps_gateway.app import run_worker
    from dps_gateway.config import ConfigError, load_config
    from dps_gateway.prompt.tokenizer import TokenizerError

    try:
        run_worker(load_config(config_file), config_file, reuse_port=True)
    except (ConfigError, TokenizerError) as error:
        print(f"dps gateway: {error}", file=sys.stderr)
        sys.exit(CANNOT_START)


def run_workers(config_file: Path, count: int, log_level: str) -> int:
    """Run `count` workers until SIGTERM or SIGINT; they drain as one would. Returns the exit status.

    It is CANNOT_START if one of the first ones cannot start. A replacement is tried again instead: the others
    go on with what they have.
    """
    stopping, status = False, 0

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dps-metrics-") as metrics:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = metrics

        def start() -> BaseProcess:
            process = context.Process(target=_worker, args=(config_file, log_level))
            process.start()
            return process

        first = [start() for _ in range(count)]
        workers = list(first)
        while not stopping:
            time.sleep(RESPAWN_SECONDS / 5)
            for place, worker in enumerate(workers):
                if worker in first and worker.exitcode == CANNOT_START:
                    stopping, status = True, CANNOT_START
                if not worker.is_alive() and not stopping:
                    mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
                    time.sleep(RESPAWN_SECONDS)
                    workers[place] = start()
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
    return status
