"""The documents' fragments of a DPSRouter's spec."""

from typing import Any

import pytest

from dps_operator.builders.children import children
from dps_operator.builders.pods import overlay
from dps_testkit.operator.fragments import fragments
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router

FRAGMENTS = fragments()


def test_fragments_are_found() -> None:
    assert len(FRAGMENTS) >= 10


@pytest.mark.parametrize("fragment", FRAGMENTS.values(), ids=FRAGMENTS.keys())
def test_fragment_is_accepted_in_the_smallest_router(fragment: dict[str, Any]) -> None:
    children(router(overlay(SMALLEST, fragment)), SETTINGS, "")


def test_example_of_a_pod_template_is_merged_as_described() -> None:
    (fragment,) = [one for one in FRAGMENTS.values() if "podTemplate" in str(one)]
    (deployment,) = [
        manifest
        for manifest in children(router(overlay(SMALLEST, fragment)), SETTINGS, "")
        if manifest["kind"] == "Deployment" and manifest["metadata"]["name"].endswith("-greedy")
    ]
    pod = deployment["spec"]["template"]["spec"]
    (engine,) = pod["containers"]
    assert pod["priorityClassName"] == "gpu-serving"
    assert [
        (one["topologyKey"], one["whenUnsatisfiable"], one["maxSkew"], "labelSelector" in one)
        for one in pod["topologySpreadConstraints"]
    ] == [
        ("topology.kubernetes.io/zone", "DoNotSchedule", 1, True),
        ("kubernetes.io/hostname", "ScheduleAnyway", 1, True),
    ]
    assert {"models", "adapters"} <= {volume["name"] for volume in pod["volumes"]}
    assert {"/models", "/adapters"} <= {mount["mountPath"] for mount in engine["volumeMounts"]}
    assert engine["resources"]["limits"]["ephemeral-storage"] == "60Gi"
    assert next(one for one in pod["volumes"] if one["name"] == "models")["emptyDir"] == {"sizeLimit": "60Gi"}
