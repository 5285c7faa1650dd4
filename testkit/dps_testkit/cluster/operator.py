"""An operator process on a cluster, with the rights of a ServiceAccount."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import yaml

from dps_local.processes import free_ports
from dps_testkit.cluster.kube import Kube
from dps_testkit.waiting import eventually

START_SECONDS = 240.0
"""Limit for the start of an operator process."""


def service_account_kubeconfig(kube: Kube, account: str, path: Path, server: str = "") -> Path:
    """Write a kubeconfig that authenticates as a ServiceAccount, so that a process has its permissions only.

    server: the URL of the API server, if not that of `kube`.
    """
    config = yaml.safe_load(kube.kubeconfig.read_text())
    token = kube.kubectl("create", "token", account, "--duration", "2h").strip()
    config["users"][0]["user"] = {"token": token}
    if server:
        config["clusters"][0]["cluster"] = {"server": server}
    path.write_text(yaml.safe_dump(config))
    return path


class Operator:
    """An operator process that runs this checkout's code."""

    def __init__(self, kubeconfig: Path, log: Path, *arguments: str) -> None:
        (self.port,) = free_ports(1)
        self.log = log
        self._output = log.open("a")
        command = [sys.executable, "-m", "dps_operator", "--health-port", str(self.port), *arguments]
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self._process = subprocess.Popen(command, env=environment, stdout=self._output, stderr=self._output)

    def wait_ready(self) -> None:
        """Wait until it has listed all objects, which on a busy machine takes a minute, mostly of imports."""

        def ready() -> None:
            try:
                assert self.get("/readyz") == "ok"
            except OSError as error:
                raise AssertionError(f"the operator is not ready: {error}") from error

        eventually(ready, START_SECONDS)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def get(self, path: str) -> str:
        """GET one of the operator's own endpoints, such as /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    def writes(self) -> int:
        """The number of write calls to the API server so far."""
        return self._sum("dps_operator_api_requests_total", 'verb="GET"')

    def reconciles(self) -> int:
        """The number of reconciles that have ended so far."""
        return self._sum("dps_operator_reconcile_total")

    def _sum(self, counter: str, without: str = "\n") -> int:
        """The sum of a counter's series, except those that contain `without`."""
        lines = self.get("/metrics").splitlines()
        counted = [line for line in lines if line.startswith(f"{counter}{{") and without not in line]
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in counted)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def stop(self) -> int:
        """Send SIGTERM, as a rollout does; returns the exit status."""
        self._process.terminate()
        try:
            return self._process.wait(timeout=20)
        finally:
            self.kill()


StartOperator = Callable[..., Operator]
"""Starts an operator with additional arguments; `server` overrides the URL of the API server."""
