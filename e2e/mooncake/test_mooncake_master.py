"""The real Mooncake master with the operator's command line, and clients over TCP with the engines' settings."""

import ctypes.util
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dps_local.processes import free_ports
from dps_operator.build import children
from dps_operator.build.prefix_cache import MASTER_PORT
from dps_operator.objects import Manifest
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router
from dps_testkit.waiting import PATIENCE_SECONDS, eventually

HERE = Path(__file__).parent
LIBRARIES = ("ibverbs", "nl-3", "nl-route-3")
CAN_INSTALL = os.geteuid() == 0 and shutil.which("apt-get") is not None
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not CAN_INSTALL and None in map(ctypes.util.find_library, LIBRARIES),
        reason="Mooncake loads libibverbs, libnl-3 and libnl-route-3, which only root can install, with apt-get",
    ),
]

SPEC = {
    **SMALLEST,
    "engine": {"version": "0.5.23"},
    "prefixCache": {"mode": "Common", "mooncake": {"segmentSize": "64Mi"}},
}
ADDRESS = f"qwen-mooncake.serving.svc:{MASTER_PORT}"
"""The address of the master's Service, which does not exist here."""
LEASE_SECONDS = 10.0
"""Mooncake does not evict what was read in this time, by default."""


@dataclass(frozen=True)
class Master:
    """The ports of a running master, by their names in the Deployment."""

    ports: dict[str, int]

    def engine_settings(self) -> str:
        """The settings of the engines' storage backend, with this machine's address of the master."""
        line = container("qwen-greedy")["args"]
        settings: str = line[line.index("--hicache-storage-backend-extra-config") + 1]
        assert ADDRESS in settings
        return settings.replace(ADDRESS, f"127.0.0.1:{self.ports['rpc']}")

    def get(self, port: str, path: str) -> str:
        """The answer of the master to a GET request. Raises AssertionError if it is not 200."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[port]}{path}", timeout=2) as answer:
                text: str = answer.read().decode()
                return text
        except urllib.error.URLError as error:
            raise AssertionError(str(error)) from error


def container(name: str) -> Manifest:
    """The first container of a Deployment."""
    (found,) = [
        one["spec"]["template"]["spec"]["containers"][0]
        for one in children(router(SPEC), SETTINGS, "")
        if one["kind"] == "Deployment" and one["metadata"]["name"] == name
    ]
    result: Manifest = found
    return result


@pytest.fixture(scope="module")
def commands() -> Path:
    """The folder of Mooncake's commands."""
    done = subprocess.run([HERE / "install"], stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return Path(done.stdout.strip())


@pytest.fixture(scope="module")
def master(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """A master with the command line of the operator's Deployment on free ports, whose probes succeed."""
    made, folder = container("qwen-mooncake"), tmp_path_factory.mktemp("master")
    running = Master(dict(zip(("rpc", "http"), free_ports(2), strict=True)))
    # The last value of a flag applies.
    options = [f"--rpc_port={running.ports['rpc']}", f"--metrics_port={running.ports['http']}"]
    environment = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"}
    with (folder / "master.log").open("w") as log:
        command = [*made["command"], *made["args"], *options]
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
        try:
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):

                def succeeds(probe: Manifest = made[name]) -> None:
                    assert process.poll() is None, (folder / "master.log").read_text()
                    running.get(probe["httpGet"]["port"], probe["httpGet"]["path"])

                eventually(succeeds)
            yield running
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def client(commands: Path, action: str, settings: str, key: str = "page_0_k") -> subprocess.Popen[str]:
    """A process that writes or reads a page, or fills the store."""
    arguments = [str(commands / "python"), str(HERE / "store_client.py"), action, key, settings]
    return subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def test_page_that_one_engine_writes_is_read_by_others_of_the_same_geometry(
    commands: Path, master: Master
) -> None:
    settings = master.engine_settings()
    foreign = json.dumps(json.loads(settings) | {"extra_backend_tag": "dps-other"})
    with client(commands, "write", settings) as writer:
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == "written\n"
            for mine, expected in ((settings, "same\n"), (foreign, "different\n")):
                with client(commands, "read", mine) as reader:
                    assert reader.communicate(timeout=PATIENCE_SECONDS)[0] == expected
            writer.communicate(timeout=PATIENCE_SECONDS)
        finally:
            writer.kill()


def test_full_store_has_no_space_when_pages_that_were_just_read_could_be_evicted(
    commands: Path, master: Master
) -> None:
    """Mooncake does not evict them at once. The store counts as full when they were evicted as well."""
    settings = master.engine_settings()
    without_segment = json.dumps(json.loads(settings) | {"global_segment_size": 0})
    with client(commands, "write", settings) as writer:
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == "written\n"
            with client(commands, "read", without_segment) as reader:
                assert reader.communicate(timeout=PATIENCE_SECONDS)[0] == "same\n"
            with client(commands, "fill", settings, "fill") as filler:
                assert filler.stdout is not None
                assert filler.stdout.readline() == "full\n"
                ends = time.monotonic() + LEASE_SECONDS
                while time.monotonic() < ends:
                    with client(commands, "write", without_segment, "late") as late:
                        assert late.communicate("", timeout=PATIENCE_SECONDS)[0] == ""
                filler.communicate(timeout=PATIENCE_SECONDS)
        finally:
            writer.kill()


def test_master_serves_metrics_for_prometheus(master: Master) -> None:
    """At the port and the path that the ServiceMonitor of a DPSRouter selects."""
    families = text_string_to_metric_families(master.get("http", "/metrics"))
    assert "master_allocated_bytes" in {family.name for family in families}
