"""What the pods of emulated engines with a common prefix cache mount. `test_sglang_pods.py` has real engines."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.providers import Cluster
from e2e.node.conftest import READY_SECONDS, emulated

POOLS = ("speculative", "greedy")
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
    """A file system of the node, whose root the engines' user can write to."""
    if node.state is None:
        pytest.skip("the nodes of this cluster cannot mount this machine's folders")
    pages = tmp_path_factory.mktemp("pages")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0777", "none", pages], check=True)
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
