"""Which pod template and which engine version a pool keeps when the operator is upgraded."""

import copy
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from dps_engines.pools import PoolName
from dps_engines.sglang.runtime import DEFAULT_VERSION
from dps_operator.build.engine import engine_deployment
from dps_operator.objects import ENGINE, SPEC_HASH
from dps_operator.rollout import history
from dps_testkit.operator.routers import EVERYTHING, MOONCAKE, PREFIX_CACHE, SETTINGS, SMALLEST, router
from tests.operator.harness import NOW, OperatorHarness, serving
from tests.operator.objects import replicas, workload

NEXT_RELEASE = replace(SETTINGS, plugin_image="operator:2", gateway_image="gateway:2")
"""A release of the operator that generates another pod template for engines and gateways."""
POOLS = ("qwen-speculative", "qwen-greedy")


def templates(harness: OperatorHarness) -> list[Any]:
    return [copy.deepcopy(harness.object("Deployment", name)["spec"]["template"]) for name in POOLS]


async def test_upgrade_of_the_operator_restarts_no_engine() -> None:
    harness = await serving(PREFIX_CACHE)
    before = templates(harness)
    harness.restart(NEXT_RELEASE)
    await harness.reconcile()
    assert templates(harness) == before
    assert [harness.status()["pools"][pool]["outdated"] for pool in ("speculative", "greedy")] == [True, True]
    gateway = harness.object("Deployment", "qwen-gateway")["spec"]["template"]["spec"]["containers"][0]
    assert gateway["image"] == "gateway:2"
    harness.rolled_out()
    await harness.reconcile()
    assert "both pools keep the pod template" in harness.condition("Progressing")["message"]
    writes = harness.cluster.writes()
    await harness.reconcile()
    assert harness.cluster.writes() == writes
    harness.edit({**PREFIX_CACHE, "paused": True})
    await harness.reconcile()
    assert [harness.status()["pools"][pool]["outdated"] for pool in ("speculative", "greedy")] == [True, True]


def with_greedy(**greedy: Any) -> dict[str, Any]:
    return {"pools": {**SMALLEST["pools"], "greedy": greedy}}


CHANGES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "replicas": (with_greedy(replicas=2), [1, 1]),
    "routing": ({"routing": {"thresholdTokens": 1}}, [1, 1]),
    "gateway": ({"gateway": {"replicas": 3}}, [1, 1]),
    "strategy": (with_greedy(strategy={"type": "Recreate"}), [1, 1]),
    "explicit default version": ({"engine": {"version": "0.5.23", "upgradePolicy": "Manual"}}, [1, 1]),
    "monitoring, access log and links": (
        {
            "telemetry": {
                "serviceMonitor": {},
                "accessLog": True,
                "traceUrl": "https://tracing.example/{trace}",
            }
        },
        [1, 1],
    ),
    "session store": ({"sessionStore": EVERYTHING["sessionStore"]}, [1, 1]),
    "arguments of one pool": (with_greedy(args=["--log-level", "debug"]), [1, 2]),
    # The rollout of the greedy pool starts when that of the speculative pool has finished.
    "automatic upgrades": ({"engine": {"version": "0.5.23", "upgradePolicy": "Automatic"}}, [2, 1]),
}


@pytest.mark.parametrize(("change", "releases"), CHANGES.values(), ids=CHANGES.keys())
async def test_change_after_an_upgrade_updates_only_the_pools_that_it_affects(
    change: dict[str, Any], releases: list[int]
) -> None:
    harness = await serving(PREFIX_CACHE)
    before = templates(harness)
    harness.restart(NEXT_RELEASE)
    harness.edit({**PREFIX_CACHE, **change})
    await harness.reconcile()
    for pool, old, new, release in zip(POOLS, before, templates(harness), releases, strict=True):
        assert new["spec"]["initContainers"][0]["image"] == f"operator:{release}"
        assert (new == old) == (release == 1)
        if release == 2:
            assert "outdated" not in harness.status()["pools"][pool.removeprefix("qwen-")]


async def test_pool_that_does_not_serve_takes_the_new_pod_template() -> None:
    harness = await serving(PREFIX_CACHE)
    harness.available("qwen-greedy", 0)
    harness.restart(NEXT_RELEASE)
    await harness.reconcile()
    images = [template["spec"]["initContainers"][0]["image"] for template in templates(harness)]
    assert images == ["operator:1", "operator:2"]


def engine_image(harness: OperatorHarness, pool: str = "qwen-speculative") -> str:
    image: str = harness.object("Deployment", pool)["spec"]["template"]["spec"]["containers"][0]["image"]
    return image


async def test_version_in_use_is_kept_until_upgrades_are_automatic() -> None:
    harness = await serving(SMALLEST)
    for name in POOLS:
        harness.object("Deployment", name)["metadata"]["annotations"][ENGINE] = "SGLang 0.5.24"
    engine = {"args": ["--log-level", "debug"]}
    harness.edit({**SMALLEST, "engine": engine})
    await harness.reconcile()
    assert engine_image(harness) == "lmsysorg/sglang:v0.5.24"
    assert harness.status()["pools"]["speculative"]["revisions"][0]["engine"] == "SGLang 0.5.24"
    harness.edit({**SMALLEST, "engine": {**engine, "upgradePolicy": "Automatic"}})
    await harness.reconcile()
    assert engine_image(harness) == f"lmsysorg/sglang:v{DEFAULT_VERSION}"


async def test_status_has_the_revisions_of_each_pool() -> None:
    harness = await serving(SMALLEST)
    pool = harness.status()["pools"]["greedy"]
    image = f"lmsysorg/sglang:v{DEFAULT_VERSION}"
    first = {"engine": f"SGLang {DEFAULT_VERSION}", "image": image, "generation": 1, "time": NOW}
    (found,) = pool["revisions"]
    assert {**first, "revision": found["revision"]} == found
    harness.edit({**SMALLEST, "pools": {**SMALLEST["pools"], "greedy": {"args": ["--log-level", "debug"]}}})
    await harness.reconcile()
    revisions = harness.status()["pools"]["greedy"]["revisions"]
    assert [one["generation"] for one in revisions] == [2, 1]
    assert len(harness.status()["pools"]["speculative"]["revisions"]) == 1


def test_history_is_limited_to_the_newest_revisions() -> None:
    found: list[Any] = []
    for number in range(7):
        found = history(workload("greedy", replicas(), f"hash-{number}"), found, number, f"t{number}")
    assert [one["revision"] for one in found] == ["hash-6", "hash-5", "hash-4", "hash-3", "hash-2"]


def spec_hash(change: dict[str, Any], pool: PoolName = "speculative") -> str:
    made = engine_deployment(router({**SMALLEST, **change}), pool, SETTINGS)
    result: str = made["metadata"]["annotations"][SPEC_HASH]
    return result


@pytest.mark.parametrize(("placement", "same"), [("SeparateGPUs", True), ("SharedGPU", False)])
def test_spec_hash_covers_the_engine_that_shares_the_gpu(placement: str, same: bool) -> None:
    """Its draft model reduces the memory that is left for the other engine."""
    placed = {"placement": placement}
    changed = {**placed, "pools": {"speculative": {"speculation": {"algorithm": "Ngram"}}}}
    assert (spec_hash(placed, "greedy") == spec_hash(changed, "greedy")) is same


EAGLE: dict[str, Any] = {"algorithm": "Eagle3", "draftModel": "head"}
AUTH: dict[str, Any] = {"auth": {"secretName": "keys"}}
DIFFERENT: dict[str, dict[str, Any]] = {
    "smallest": SMALLEST,
    "engines on one GPU": {**SMALLEST, "placement": "SharedGPU"},
    "engine": {**SMALLEST, "engine": {"args": ["--log-level", "debug"]}},
    "node pool": {**SMALLEST, "nodePool": {"profile": "A100-40GB"}},
    "traces": {**SMALLEST, "telemetry": {"otlpEndpoint": "http://collector:4317"}},
    "model": {**SMALLEST, "model": {"name": "m"}},
    "speculation": {**SMALLEST, "pools": {"speculative": {"speculation": {"algorithm": "Ngram"}}}},
    "shared": PREFIX_CACHE,
    "algorithm that cannot share": {**PREFIX_CACHE, "pools": {"speculative": {"speculation": EAGLE}}},
    "other KV cache of one pool": {
        **PREFIX_CACHE,
        "pools": {**PREFIX_CACHE["pools"], "greedy": {"args": ["--kv-cache-dtype", "fp8_e5m2"]}},
    },
    "other version of one pool": {
        **PREFIX_CACHE,
        "pools": {**PREFIX_CACHE["pools"], "greedy": {"version": "0.5.24"}},
    },
    "separate": {**PREFIX_CACHE, "prefixCache": {"mode": "Separate"}},
    "separate with several tenants": {
        **PREFIX_CACHE,
        "prefixCache": {"mode": "Separate"},
        "gateway": AUTH,
    },
    "unshareable with several tenants": {
        **PREFIX_CACHE,
        "pools": {"speculative": {"speculation": EAGLE}},
        "gateway": AUTH,
    },
    "Mooncake": MOONCAKE,
    "Mooncake with another log level of the greedy pool": {
        **MOONCAKE,
        "pools": {**MOONCAKE["pools"], "greedy": {"args": ["--log-level", "debug"]}},
    },
}


@pytest.mark.parametrize("pool", ["speculative", "greedy"])
def test_specs_with_different_pod_templates_have_different_hashes(pool: PoolName) -> None:
    """Otherwise a pool would keep a pod template that the spec no longer describes (`kept_pools`)."""
    made = {name: engine_deployment(router(spec), pool, SETTINGS) for name, spec in DIFFERENT.items()}
    pairs = [
        (one, other)
        for one, other in combinations(made, 2)
        if made[one]["spec"]["template"] != made[other]["spec"]["template"]
        and made[one]["metadata"]["annotations"][SPEC_HASH]
        == made[other]["metadata"]["annotations"][SPEC_HASH]
    ]
    assert pairs == []
