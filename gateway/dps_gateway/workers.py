"""Several gateway processes on one port (SO_REUSEPORT): the kernel spreads connections, a lost one is replaced."""

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

RESPAWN_SECONDS = 1.0


def _worker(config_file: Path, log_level: str) -> None:
    import logging
    import sys

    logging.basicConfig(
        level=log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    from dps_gateway.app import run_worker
    from dps_gateway.config import load_config

    run_worker(load_config(config_file), config_file, reuse_port=True)


def run_workers(config_file: Path, count: int, log_level: str) -> int:
    """Run `count` workers until SIGTERM or SIGINT; they drain as one would."""
    stopping = False

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

        workers = [start() for _ in range(count)]
        while not stopping:
            time.sleep(RESPAWN_SECONDS / 5)
            for place, worker in enumerate(workers):
                if not worker.is_alive() and not stopping:
                    time.sleep(RESPAWN_SECONDS)
                    workers[place] = start()
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
    return 0
