"""The pods of engines with a common prefix cache: what they mount, and an engine of another geometry.

The emulated engines do not use the plugin's storage. A process in each engine's container does: `fake_engine.py`.
`test_sglang_pods.py` has real engines.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import pytest

from dps_testkit.cluster.kube import BIN, Kube
from dps_testkit.cluster.providers import Cluster
from dps_testkit.waiting import eventually
from e2e.node import fake_engine
from e2e.node.conftest import READY_SECONDS, emulated
from e2e.node.sessions import turns

POOLS = ("speculative", "greedy")
DISK = 24 * 2**20
"""The size of the volume, about twice that of all pages."""
CHECK = """
import importlib.metadata, json, pathlib
plugins = importlib.metadata.entry_points(group="sglang.srt.plugins")
page = pathlib.Path("/prefix-cache/page")
page.write_text("page")
print(json.dumps({
    "plugins": [plugin.value for plugin in plugins],
    "loaded from": plugins["dps_sglang"].load().__code__.co_filename,
    "secret": pathlib.Path("/etc/dps-prefix-cache/secret").read_text(),
    "page": page.read_text(),
}))
"""


@pytest.fixture(scope="module")
def directory(node: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system of the node, whose root the engines' user can write to."""
    if node.state is None:
        pytest.skip("the nodes of this cluster cannot mount this machine's folders")
    pages = tmp_path_factory.mktemp("pages")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0777", "none", pages], check=True)
    yield pages
    subprocess.run(["umount", "-l", pages], check=True)


@pytest.fixture(scope="module")
def router(kube: Kube, directory: Path) -> Iterator[str]:
    """The name of a DPSRouter whose pools have a common prefix cache."""
    spec = emulated("sharing")
    spec["spec"]["engine"]["env"] = [{"name": "PYTHONPATH", "value": "/opt/emulated"}]
    spec["spec"]["prefixCache"] = {"mode": "Common", "file": {"hostPath": str(directory)}, "size": "1Gi"}
    kube.apply(spec)
    kube.until("sharing", READY_SECONDS, Ready="True", PrefixCacheShared="BothWays")
    yield "sharing"
    kube.kubectl("delete", "dpsrouter", "sharing")


def in_engine(kube: Kube, router: str, pool: str, *command: str) -> str:
    """Run a command in an engine's container, and return its output."""
    return kube.kubectl("exec", f"deployment/{router}-{pool}", "-c", "engine", "--", *command)


def test_engines_of_both_pools_have_the_plugin_the_same_secret_and_the_same_directory(
    kube: Kube, router: str, directory: Path
) -> None:
    found = [json.loads(in_engine(kube, router, pool, "python3", "-c", CHECK)) for pool in POOLS]
    assert found[0] == found[1]
    assert len(found[0].pop("secret")) >= 32
    assert found[0] == {
        "plugins": ["dps_sglang.plugin:register"],
        "loaded from": "/opt/dps-plugin/dps_sglang/plugin.py",
        "page": "page",
    }
    assert (directory / "page").read_text() == "page"


@dataclass
class FakeEngine:
    """A `fake_engine.py` in an engine's container, and what it has printed."""

    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    @property
    def rounds(self) -> list[int]:
        """The pages fetched in each round."""
        return [int(line) for line in self.lines[1:]]

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. Fails if the process ends, for example because of a wrong page."""

        def check() -> None:
            assert self.process.poll() is None, self.log.read_text()
            assert condition()

        eventually(check)

    def fetches_all(self) -> None:
        """Wait until it fetches all pages of a prompt."""
        known = len(self.rounds)
        self.until(lambda: fake_engine.PAGES in self.rounds[known + 1 :])


@dataclass
class Storage:
    """The common prefix cache of a DPSRouter, and the fake engines that use it."""

    kube: Kube
    router: str
    logs: Path

    @contextmanager
    def fake_engine(self, pool: str, *arguments: object) -> Iterator[FakeEngine]:
        """Run one in the container of the pool's engine."""
        command = ["kubectl", "--kubeconfig", str(self.kube.kubeconfig), "--namespace", self.kube.namespace]
        command += ["exec", "--stdin", f"deployment/{self.router}-{pool}", "-c", "engine", "--"]
        command += ["python3", "-", *map(str, arguments)]
        log = self.logs / "-".join(map(str, [pool, *arguments]))
        environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        with Path(fake_engine.__file__).open() as script, log.open("w") as output:
            process = subprocess.Popen(
                command, env=environment, stdin=script, stdout=output, stderr=subprocess.STDOUT
            )
        engine = FakeEngine(process, log)
        try:
            engine.until(lambda: bool(engine.lines))
            yield engine
        finally:
            if engine.lines and process.poll() is None:
                kill = f"import os; os.kill({engine.lines[0]}, 9)"
                in_engine(self.kube, self.router, pool, "python3", "-c", kill)
            process.wait(timeout=60)


@contextmanager
def sessions(url: str) -> Iterator[list[BaseException]]:
    """Send sessions through the gateway until the block exits. Yields the failures."""
    failures: list[BaseException] = []
    ended = Event()

    def send() -> None:
        number = 0
        while not ended.is_set():
            try:
                list(turns(url, "emulated", system=f"You are agent {number}."))
            except Exception as error:
                failures.append(error)
            number += 1

    thread = Thread(target=send)
    thread.start()
    try:
        yield failures
    finally:
        ended.set()
        thread.join()


def test_an_engine_of_another_geometry_causes_no_wrong_page_and_no_failed_request(
    node: Cluster, kube: Kube, router: str, tmp_path: Path
) -> None:
    storage = Storage(kube, router, tmp_path)
    with ExitStack() as stack:
        url = stack.enter_context(node.reach(kube, f"{router}-gateway", 8000))
        failures = stack.enter_context(sessions(url))
        engines = [
            stack.enter_context(storage.fake_engine(pool, number, 64)) for number, pool in enumerate(POOLS)
        ]
        for engine in engines:
            engine.fetches_all()
        other_geometry = stack.enter_context(storage.fake_engine("greedy", 3, 32))
        for engine in (other_geometry, *engines):
            engine.fetches_all()
    assert failures == []
