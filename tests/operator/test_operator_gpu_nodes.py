"""The nodes of engines whose GPUs are shared or divided."""

from typing import Any

import pytest

from dps_operator.objects import Manifest
from dps_testkit.operator.gpu_nodes import OFFERS, Offer
from dps_testkit.operator.routers import SMALLEST
from tests.operator.objects import engine_pod


def satisfied(labels: dict[str, str], expression: dict[str, Any]) -> bool:
    """Whether a node's labels satisfy a requirement. As in Kubernetes, an absent label satisfies NotIn."""
    listed: bool = labels.get(expression["key"]) in expression["values"]
    return listed is (expression["operator"] == "In")


def runs_on(pod: Manifest, node: Offer) -> bool:
    """Whether the labels and the resource of a node are those that a pod of an engine requires."""
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = any(
        all(satisfied(node.labels, expression) for expression in term["matchExpressions"])
        for term in required["nodeSelectorTerms"]
    )
    limits: dict[str, str] = pod["containers"][0]["resources"]["limits"]
    return labels and limits == {node.resource: "1"}


@pytest.mark.parametrize("name", OFFERS)
def test_engines_run_only_on_the_node_that_offers_gpus_as_the_spec_says(name: str) -> None:
    offer = OFFERS[name]
    pod = engine_pod({**SMALLEST, **offer.spec})
    suitable = {
        other for other, node in OFFERS.items() if node.platform == offer.platform and runs_on(pod, node)
    }
    assert suitable == {name}
