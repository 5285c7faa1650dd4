"""What the pods of emulated engines with a common prefix cache mount, on a claim that the operator creates.

`test_sglang_pods.py` has real engines and a directory of the node.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.providers import Cluster
from e2e.node.conftest import READY_SECONDS, emulated

POOLS = ("speculative", "greedy")
CHECK = """
import importlib.metadata, json, pathlib, sys
plugins = importlib.metadata.entry_points(group="sglang.srt.plugins")
directory = pathlib.Path("/prefix-cache")
(directory / f"{sys.argv[1]}.written").write_text(sys.argv[1])
print(json.dumps({
    "plugins": [plugin.value for plugin in plugins],
    "loaded from": plugins["dps_sglang"].load().__code__.co_filename,
    "secret": pathlib.Path("/etc/dps-prefix-cache/secret").read_text(),
    "pages": {page.stem: page.read_text() for page in directory.glob("*.written")},
}))
"""


@pytest.fixture(scope="module")
def router(node: Cluster, kube: Kube) -> Iterator[str]:
    """The name of a DPSRouter whose pools have a common prefix cache on a claim that the operator creates."""
    if node.state is None:
        pytest.skip("the nodes of this cluster may have no volumes that several pods can mount")
    spec = emulated("sharing")
    spec["spec"]["engine"]["env"] = [{"name": "PYTHONPATH", "value": "/opt/emulated"}]
    spec["spec"]["prefixCache"] = {"mode": "Common", "file": {"claim": {"size": "2Gi"}}, "size": "1Gi"}
    kube.apply(spec)
    kube.until("sharing", READY_SECONDS, Ready="True", PrefixCacheShared="BothWays")
    yield "sharing"
    kube.kubectl("delete", "dpsrouter", "sharing")


def in_engine(kube: Kube, router: str, pool: str, *command: str) -> str:
    """Run a command in an engine's container, and return its output."""
    return kube.kubectl("exec", f"deployment/{router}-{pool}", "-c", "engine", "--", *command)


def test_engines_of_both_pools_have_the_plugin_the_same_secret_and_the_same_volume(
    kube: Kube, router: str
) -> None:
    claim = kube.get("persistentvolumeclaim", f"{router}-prefix-cache")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "2Gi"}
    volume = kube.get("persistentvolume", claim["spec"]["volumeName"])

    found = [json.loads(in_engine(kube, router, pool, "python3", "-c", CHECK, pool)) for pool in POOLS]
    pages = [each.pop("pages") for each in found]
    assert found[0] == found[1]
    assert len(found[0].pop("secret")) >= 32
    assert found[0] == {
        "plugins": ["dps_sglang.plugin:register"],
        "loaded from": "/opt/dps-plugin/dps_sglang/plugin.py",
    }
    first, second = POOLS
    assert pages == [{first: first}, {first: first, second: second}]
    directory = Path(volume["spec"]["hostPath"]["path"])
    assert sorted(page.name for page in directory.glob("*.written")) == sorted(
        f"{pool}.written" for pool in POOLS
    )
