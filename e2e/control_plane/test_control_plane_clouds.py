"""The documented commands for GKE, EKS and AKS, on nodes with the labels and taints of each cloud."""

from pathlib import Path

import pytest

from dps_testkit.cluster.kube import Kube
from e2e.node.commands import run_documented

pytest_plugins = ["e2e.cluster.fixtures"]

CLOUDS = ("gke", "eks", "aks")
SECONDS = 300.0


@pytest.mark.usefixtures("operator")
def test_documented_commands_lead_to_engines_on_the_nodes_of_each_cloud(kube: Kube) -> None:
    run_documented(Path(__file__), kube, SECONDS)
    for cloud in CLOUDS:
        engines = f"dpsrouter.io/router=qwen-{cloud},dpsrouter.io/component in (speculative,greedy)"
        assert {pod["spec"]["nodeName"] for pod in kube.list("pod", engines)} == {f"{cloud}-0"}
    claims = [
        claim for claim in kube.list("persistentvolumeclaim") if "qwen-eks" in claim["metadata"]["name"]
    ]
    assert {claim["spec"]["storageClassName"] for claim in claims} == {"gp3"}, "EKS has no default class"
