"""spec.placement SharedGPU: both engines on one GPU."""

from typing import Any

import pytest

from dps_engines.pools import POOLS
from dps_operator.api.model import NodePool
from dps_operator.builders.engine import engine_deployment
from dps_operator.builders.node_pool import placement
from dps_operator.errors import SpecError
from dps_operator.observe import Child
from dps_operator.resources import SPEC_HASH, Manifest
from dps_operator.rollout import waits_for_neighbour
from dps_testkit.operator.harness import OperatorHarness
from dps_testkit.operator.objects import replicas, workload
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router

SHARED: dict[str, Any] = {**SMALLEST, "placement": "SharedGPU"}


def deployment(spec: dict[str, Any], pool: Any) -> Manifest:
    return engine_deployment(router(spec), pool, SETTINGS)


def arguments(spec: dict[str, Any], pool: Any) -> list[str]:
    found: list[str] = deployment(spec, pool)["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


def limits(spec: dict[str, Any], pool: Any) -> dict[str, str]:
    """The resources of the device plugin that an engine requests."""
    (container,) = deployment(spec, pool)["spec"]["template"]["spec"]["containers"]
    found: dict[str, str] = container["resources"]["limits"]
    return found


def test_the_memory_of_the_gpu_is_divided_between_the_engines() -> None:
    for pool, fraction in (("speculative", "0.70"), ("greedy", "0.64")):
        line = arguments(SHARED, pool)
        assert line[line.index("--mem-fraction-static") + 1] == fraction
        assert line[line.index("--max-total-tokens") + 1] == "167936"
        assert "--max-total-tokens" not in arguments(SMALLEST, pool)


def test_each_engine_requests_one_of_the_shares_of_the_gpu() -> None:
    for pool in POOLS:
        assert limits(SHARED, pool) == {"nvidia.com/gpu": "1"}
        renamed = {**SHARED, "nodePool": {"sharing": {"renamed": True}}}
        assert limits(renamed, pool) == {"nvidia.com/gpu.shared": "1"}
        assert "--max-total-tokens" in arguments(renamed, pool)


MPS: dict[str, Any] = {**SHARED, "nodePool": {"sharing": {"strategy": "MPS"}}}


def test_mps_gives_each_engine_half_of_the_memory() -> None:
    for pool, fraction, tokens in (("speculative", "0.68", "121856"), ("greedy", "0.68", "237568")):
        line = arguments(MPS, pool)
        assert line[line.index("--mem-fraction-static") + 1] == fraction
        assert line[line.index("--max-total-tokens") + 1] == tokens
    with pytest.raises(SpecError, match=r"the engine needs .* but its part of the GPU has 20\.0 GiB"):
        arguments({**MPS, "nodePool": {**MPS["nodePool"], "profile": "A100-40GB"}}, "greedy")


def test_with_mps_nothing_hides_the_shared_memory_that_the_device_plugin_mounts() -> None:
    def mounts(spec: dict[str, Any]) -> set[str]:
        (container,) = deployment(spec, "greedy")["spec"]["template"]["spec"]["containers"]
        return {mount["mountPath"] for mount in container["volumeMounts"]}

    assert "/dev/shm" in mounts(SHARED)
    assert "/dev/shm" not in mounts(MPS)


def test_models_that_do_not_fit_beside_each_other_are_refused() -> None:
    with pytest.raises(SpecError, match=r"both engines need .* but the GPU has 40\.0 GiB"):
        deployment({**SHARED, "nodePool": {"profile": "A100-40GB"}}, "greedy")


def test_a_rollout_replaces_the_pod_unless_a_strategy_is_set() -> None:
    assert deployment(SHARED, "greedy")["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }
    own = {**SHARED, "pools": {**SMALLEST["pools"], "greedy": {"strategy": {"type": "Recreate"}}}}
    assert deployment(own, "greedy")["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize("strategy", [{"maxSurge": 1}, {"maxSurge": "50%"}, {"maxUnavailable": 1}])
def test_a_rollout_that_needs_room_for_a_third_engine_is_refused(strategy: dict[str, Any]) -> None:
    own = {**SHARED, "pools": {**SMALLEST["pools"], "greedy": {"strategy": strategy}}}
    with pytest.raises(SpecError, match=r"pools\.greedy\.strategy\.type to Recreate, or maxSurge to 0"):
        deployment(own, "greedy")


def test_a_rollout_without_an_additional_engine_is_accepted() -> None:
    own = {
        **SHARED,
        "pools": {**SMALLEST["pools"], "greedy": {"strategy": {"maxSurge": 0, "maxUnavailable": 1}}},
    }
    assert deployment(own, "greedy")["spec"]["strategy"] == deployment(SHARED, "greedy")["spec"]["strategy"]


def test_the_placement_is_part_of_the_revision_of_the_engines() -> None:
    hashes = [deployment(spec, "greedy")["metadata"]["annotations"][SPEC_HASH] for spec in (SMALLEST, SHARED)]
    assert hashes[0] != hashes[1]


def test_nodes_whose_gpus_are_shared_are_selected_and_the_other_engine_is_near() -> None:
    affinity = placement(NodePool(), {"a": "b"})["affinity"]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    (products,) = [
        expression["values"]
        for term in affinity["nodeAffinity"][required]["nodeSelectorTerms"]
        for expression in term["matchExpressions"]
        if expression["key"] == "nvidia.com/gpu.product"
    ]
    assert "NVIDIA-A100-SXM4-80GB-SHARED" in products
    assert all(product.endswith("-SHARED") for product in products)
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}}
    assert affinity["podAffinity"] == {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]
    }


READY, STARTING, STOPPED = replicas(), replicas(0, 1), replicas(0, 0)
ORDER: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing exists": ({}, True),
    "greedy starts": ({"greedy": STARTING}, True),
    "greedy is ready": ({"greedy": READY, "speculative": STOPPED}, False),
    "both run": ({"greedy": READY, "speculative": READY}, False),
    "greedy restarts": ({"greedy": STARTING, "speculative": READY}, False),
    "both were suspended": ({"greedy": STOPPED, "speculative": STOPPED}, True),
}


@pytest.mark.parametrize(("observed", "expected"), ORDER.values(), ids=ORDER.keys())
def test_the_speculative_engine_starts_after_the_greedy_one(observed: dict[str, Any], expected: bool) -> None:
    children: dict[str, Child] = {name: workload(name, counts) for name, counts in observed.items()}
    assert waits_for_neighbour(router(SHARED).spec, children) is expected
    assert not waits_for_neighbour(router(SMALLEST).spec, children)


async def test_the_engines_are_started_one_after_the_other_and_the_status_says_so() -> None:
    harness = OperatorHarness(SHARED)
    await harness.reconcile()
    assert harness.object("Deployment", "qwen-greedy")["spec"]["replicas"] == 1
    assert harness.object("Deployment", "qwen-speculative")["spec"]["replicas"] == 0
    await harness.reconcile()
    waiting = harness.condition("SpeculativePoolReady")
    assert (waiting["reason"], waiting["message"]) == (
        "Starting",
        "the engine starts when that of the greedy pool is ready, because both share a GPU",
    )
    harness.available("qwen-greedy")
    await harness.reconcile()
    assert harness.object("Deployment", "qwen-speculative")["spec"]["replicas"] == 1
