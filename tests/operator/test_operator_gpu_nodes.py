"""The nodes of engines whose GPUs are shared or divided."""

from typing import Any

import pytest

from dps_operator.api import NodePool
from dps_operator.build.nodes import gpu_bytes
from dps_operator.errors import SpecError
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


def test_instance_that_the_gpu_does_not_have_is_refused() -> None:
    with pytest.raises(SpecError) as refused:
        engine_pod({**SMALLEST, "nodePool": {"mig": {"profile": "3g.20gb"}}})
    assert str(refused.value) == (
        "spec.nodePool.mig.profile: GPUs of profile A100-80GB have no instances of 3g.20gb; choose one of 1g.10gb, "
        "1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb"
    )


def test_memory_of_instances_of_other_gpus_is_unknown() -> None:
    assert gpu_bytes(NodePool.model_validate({"profile": "None", "mig": {"profile": "3g.71gb"}})) is None
