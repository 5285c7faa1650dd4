"""DPSRouters on nodes whose GPUs NVIDIA's device plugin or GKE offers to two pods, placed by the real scheduler."""

from collections.abc import Iterator

import pytest

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.operator.gpu_nodes import OFFERS, Offer
from dps_testkit.waiting import eventually
from e2e.cluster.routers import merged, router

pytest_plugins = ["e2e.cluster.fixtures"]

PLATFORM = "dps-test/platform"
"""A label that only the nodes of this test have."""


def node(name: str, offer: Offer) -> Manifest:
    """A node simulated by kwok, with room for two engines."""
    has = {"cpu": "1k", "memory": "10Ti", "pods": "100", offer.resource: "2"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {**offer.labels, "kubernetes.io/hostname": name, PLATFORM: offer.platform},
        },
        "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]},
        "status": {"allocatable": has, "capacity": has},
    }


@pytest.fixture
def nodes(kube: Kube) -> Iterator[None]:
    created = [node(name, offer) for name, offer in OFFERS.items()]
    kube.apply(*created, server_side=True)
    yield
    kube.kubectl("delete", "node", *OFFERS)


def placed(kube: Kube, name: str) -> list[str]:
    """The nodes of a router's engines."""
    engines = f"dpsrouter.io/router={name},dpsrouter.io/component in (speculative,greedy)"
    return [pod["spec"].get("nodeName", "") for pod in kube.list("pod", engines)]


@pytest.mark.usefixtures("nodes", "operator")
def test_both_engines_run_on_the_node_that_offers_gpus_as_the_spec_says(kube: Kube) -> None:
    for name, offer in OFFERS.items():
        platform = {"nodePool": {"nodeSelector": {PLATFORM: offer.platform}}}
        kube.apply(router(name, **merged(offer.spec, platform)))

    def check() -> None:
        assert {name: placed(kube, name) for name in OFFERS} == {name: [name, name] for name in OFFERS}

    eventually(check, 180)
