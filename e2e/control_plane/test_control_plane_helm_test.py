"""The command that the pod of `helm test` runs."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import yaml

from dps_local.processes import free_ports
from dps_testkit.cluster.kube import Kube
from dps_testkit.paths import ROOT
from dps_testkit.waiting import PATIENCE_SECONDS

pytest_plugins = ["e2e.cluster.fixtures"]


def test_it_retries_while_the_operator_is_unavailable(bare_cluster: Kube) -> None:
    chart = str(ROOT / "charts/dps-router")
    text = bare_cluster.helm("template", "dps", chart, "--show-only", "templates/tests/healthy.yaml")
    (script,) = yaml.safe_load(text)["spec"]["containers"][0]["args"]
    (port,) = free_ports(1)
    local = script.replace("dps-dps-router:8080", f"127.0.0.1:{port}")
    with subprocess.Popen([sys.executable, "-c", local], stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        try:
            assert "Connection refused" in test.stdout.readline()
            with operator_answering([503, 200], port):
                assert test.wait(PATIENCE_SECONDS) == 0
                assert test.stdout.read().splitlines()[-2:] == ["HTTP Error 503: Service Unavailable", "ok"]
        finally:
            test.kill()


@contextmanager
def operator_answering(statuses: list[int], port: int) -> Iterator[None]:
    """A server that answers with these statuses, one per request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0))
            self.end_headers()
            self.wfile.write(b"ok")

    with HTTPServer(("127.0.0.1", port), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
