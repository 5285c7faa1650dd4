"""spec.nodePool.mig: engines on instances of GPUs that MIG divides."""

from typing import Any

import pytest

from dps_operator.api import NodePool
from dps_operator.build.engine import engine_deployment
from dps_operator.build.nodes import gpu_bytes, gpu_resource
from dps_operator.errors import SpecError
from dps_operator.objects import Manifest
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router

HALF = {"profile": "3g.40gb"}


def engine(spec: dict[str, Any], pool: Any = "greedy", **mig: str) -> Manifest:
    """The engine's container on instances of an A100 80GB."""
    made = engine_deployment(router({**spec, "nodePool": {"mig": {**HALF, **mig}}}), pool, SETTINGS)
    container: Manifest = made["spec"]["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize(
    ("strategy", "resource"), [("Single", "nvidia.com/gpu"), ("Mixed", "nvidia.com/mig-3g.40gb")]
)
def test_engine_requests_one_instance_by_the_name_that_the_device_plugin_gives_it(
    strategy: str, resource: str
) -> None:
    assert engine(SMALLEST, strategy=strategy)["resources"]["limits"] == {resource: "1"}


def test_shared_instance_that_is_renamed_has_both_parts_in_its_name() -> None:
    pool = NodePool.model_validate({"mig": {**HALF, "strategy": "Mixed"}, "sharing": {"renamed": True}})
    assert gpu_resource(pool, shared=True) == "nvidia.com/mig-3g.40gb.shared"
    assert gpu_resource(pool, shared=False) == "nvidia.com/mig-3g.40gb"


def test_instance_that_the_gpu_does_not_have_is_refused() -> None:
    with pytest.raises(SpecError) as refused:
        engine(SMALLEST, profile="3g.20gb")
    assert str(refused.value) == (
        "spec.nodePool.mig.profile: GPUs of profile A100-80GB have no instances of 3g.20gb; choose one of 1g.10gb, "
        "1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb"
    )


def test_memory_of_instances_of_other_gpus_is_unknown() -> None:
    assert gpu_bytes(NodePool.model_validate({"profile": "None", "mig": {"profile": "3g.71gb"}})) is None
