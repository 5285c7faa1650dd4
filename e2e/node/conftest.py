"""Fixtures for tests on a real node: one cluster and one release of the chart per run, and a namespace per module."""

from collections.abc import Iterator

import pytest
import yaml

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.providers import Cluster, cluster
from dps_testkit.paths import ROOT

SYSTEM = "dps-system"
RELEASE = "dps"
READY_SECONDS = 240.0
"""Time limit for a DPSRouter to become ready on a busy machine."""
A100 = {"nvidia.com/gpu": 1}
LEFTOVER_KINDS = (
    "all,configmaps,secrets,serviceaccounts,roles,rolebindings,poddisruptionbudgets,networkpolicies"
)
"""Namespaced kinds that must have no objects left after a deletion."""


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that has this checkout's images and nothing installed."""
    with cluster(tmp_path_factory.mktemp("node")) as running:
        yield running


def uninstall(node: Cluster) -> None:
    """Uninstall the chart and delete the CRD, if they are installed."""
    Kube(node.kube.kubeconfig, SYSTEM).helm("uninstall", RELEASE, "--wait", "--ignore-not-found")
    node.kube.kubectl("delete", "crd", "dpsrouters.dpsrouter.io", "--ignore-not-found")


@pytest.fixture(scope="module")
def system(node: Cluster) -> Kube:
    """The namespace of the chart's release. The chart is installed unless an earlier module has installed it."""
    kube = Kube(node.kube.kubeconfig, SYSTEM)
    chart = str(ROOT / "charts/dps-router")
    kube.helm("upgrade", "--install", RELEASE, chart, "--create-namespace", "--wait", "--timeout", "100s")
    return kube


@pytest.fixture(scope="module")
def kube(system: Kube) -> Iterator[Kube]:
    """A temporary namespace shared by the tests of a module."""
    with system.scratch() as scratch:
        yield scratch


def emulated(name: str = "emulated") -> Manifest:
    """The example with emulated engines, changed to request one A100 per engine as real engines do."""
    router: Manifest = yaml.safe_load((ROOT / "manifests/examples/emulated.yaml").read_text())
    router["metadata"]["name"] = name
    del router["spec"]["nodePool"]
    for pool in router["spec"]["pools"].values():
        pool["resources"] = {"requests": pool["resources"]["requests"], "limits": dict(A100)}
    return router
