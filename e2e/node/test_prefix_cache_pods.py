"""The pods of engines with a common prefix cache have the plugin, the secret and the cache directory."""

import json
from pathlib import Path

import pytest

from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.providers import Cluster
from e2e.node.conftest import READY_SECONDS, emulated

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


@pytest.fixture
def directory(node: Cluster, tmp_path: Path) -> Path:
    """A directory of the node that the engines' user can write to."""
    if node.state is None:
        pytest.skip("the nodes of this cluster cannot mount this machine's folders")
    pages = tmp_path / "pages"
    pages.mkdir()
    pages.chmod(0o777)
    return pages


def test_engines_of_both_pools_have_the_plugin_the_same_secret_and_the_same_directory(
    kube: Kube, directory: Path
) -> None:
    router = emulated("sharing")
    router["spec"]["engine"]["env"] = [{"name": "PYTHONPATH", "value": "/opt/emulated"}]
    router["spec"]["prefixCache"] = {"mode": "Common", "file": {"hostPath": str(directory)}, "size": "1Gi"}
    kube.apply(router)
    kube.until("sharing", READY_SECONDS, Ready="True", PrefixCacheShared="BothWays")
    found = [
        json.loads(
            kube.kubectl("exec", f"deployment/sharing-{pool}", "-c", "engine", "--", "python3", "-c", CHECK)
        )
        for pool in ("speculative", "greedy")
    ]
    assert found[0] == found[1]
    assert len(found[0].pop("secret")) >= 32
    assert found[0] == {
        "plugins": ["dps_sglang.plugin:register"],
        "loaded from": "/opt/dps-plugin/dps_sglang/plugin.py",
        "page": "page",
    }
    assert (directory / "page").read_text() == "page"
    kube.kubectl("delete", "dpsrouter", "sharing")
