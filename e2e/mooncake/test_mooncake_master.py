"""The real Mooncake master with the operator's command line, and clients over TCP with the engines' settings."""

import ctypes.util
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dps_operator.builders.children import children
from dps_operator.resources import Manifest
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
    "prefixCache": {"mode": "Common", "backend": "Mooncake", "mooncake": {"segmentSize": "64Mi"}},
}
ADDRESS = "qwen-mooncake.serving.svc"
"""The host name of the master's Service, which does not exist here."""


def container(name: str) -> Manifest:
    """The first container of a Deployment."""
    (found,) = [
        one["spec"]["template"]["spec"]["containers"][0]
        for one in children(router(SPEC), SETTINGS, "", "")
        if one["kind"] == "Deployment" and one["metadata"]["name"] == name
    ]
    result: Manifest = found
    return result


def engine_settings() -> str:
    """The settings of the engines' storage backend, with this machine's address of the master."""
    line = container("qwen-greedy")["args"]
    settings: str = line[line.index("--hicache-storage-backend-extra-config") + 1]
    assert ADDRESS in settings
    return settings.replace(ADDRESS, "127.0.0.1")


def status_of_probe(probe: Manifest, ports: dict[str, int]) -> int:
    """The status that a probe of the container receives."""
    request = probe["httpGet"]
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{ports[request['port']]}{request['path']}", timeout=probe["timeoutSeconds"]
        ) as answer:
            status: int = answer.status
            return status
    except urllib.error.URLError as error:
        raise AssertionError(str(error)) from error


@pytest.fixture(scope="module")
def commands() -> Path:
    """The folder of Mooncake's commands."""
    done = subprocess.run([HERE / "install"], stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return Path(done.stdout.strip())


@pytest.fixture
def master(commands: Path, tmp_path: Path) -> Iterator[None]:
    """A master with the command line of the operator's Deployment, whose probes succeed."""
    made = container("qwen-mooncake")
    ports = {port["name"]: port["containerPort"] for port in made["ports"]}
    environment = os.environ | {"PATH": f"{commands}:{os.environ['PATH']}"}
    with (tmp_path / "master.log").open("w") as log:
        command = [*made["command"], *made["args"]]
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=log, stderr=log)
        try:
            for name in ("startupProbe", "readinessProbe", "livenessProbe"):

                def succeeds(probe: Manifest = made[name]) -> None:
                    assert process.poll() is None, (tmp_path / "master.log").read_text()
                    assert status_of_probe(probe, ports) == 200

                eventually(succeeds)
            yield
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)


def client(commands: Path, action: str, settings: str) -> subprocess.Popen[str]:
    """A process that writes or reads a page."""
    arguments = [str(commands / "python"), str(HERE / "store_client.py"), action, "page_0_k", settings]
    return subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


@pytest.mark.usefixtures("master")
def test_page_that_one_engine_writes_is_read_by_others_of_the_same_geometry(commands: Path) -> None:
    settings = engine_settings()
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
