"""Fixtures of tests on a real node: one cluster per run, with the chart installed once."""

from collections.abc import Iterator

import pytest
import yaml

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster, cluster
from dps_testkit.paths import ROOT

SYSTEM = "dps-system"
RELEASE = "dps"
READY_SECONDS = 240.0
"""For a DPSRouter, on a machine that is busy with other things as well."""
A100 = {"nvidia.com/gpu": 1}


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster, with this checkout's images and nothing else."""
    with cluster(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture(scope="module")
def system(node: Cluster) -> Iterator[Kube]:
    """The namespace of the chart's release, which each module installs and removes as a user would."""
    kube = Kube(node.kube.kubeconfig, SYSTEM)
    chart = str(ROOT / "charts/dps-router")
    kube.helm("upgrade", "--install", RELEASE, chart, "--create-namespace", "--wait", "--timeout", "100s")
    yield kube
    kube.helm("uninstall", RELEASE, "--wait", "--ignore-not-found")
    kube.kubectl("delete", "crd", "dpsrouters.dpsrouter.io", "--ignore-not-found")


@pytest.fixture(scope="module")
def kube(system: Kube) -> Iterator[Kube]:
    """A namespace of the module's own."""
    with system.scratch() as scratch:
        yield scratch


def emulated(name: str = "emulated") -> Manifest:
    """The example with emulated engines, but asking for an A100 for each as real ones do."""
    router: Manifest = yaml.safe_load((ROOT / "manifests/examples/emulated.yaml").read_text())
    router["metadata"]["name"] = name
    del router["spec"]["nodePool"]
    for pool in router["spec"]["pools"].values():
        pool["resources"] = {"requests": pool["resources"]["requests"], "limits": dict(A100)}
    return router
