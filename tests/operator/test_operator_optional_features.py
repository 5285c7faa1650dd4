"""The conditions of optional features, on which readiness does not depend, and warnings of large models."""

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from dps_engines.pools import POOLS
from dps_operator.diagnose import CacheHealth
from dps_operator.errors import ClusterError, NotInstalledError
from dps_operator.objects import Component
from dps_testkit.operator.routers import PREFIX_CACHE, SMALLEST, VLLM
from tests.operator.harness import KEY, OperatorHarness
from tests.operator.objects import pod, waiting


@dataclass(frozen=True)
class Case:
    """How a reason comes about: a spec, and a change of the cluster after the first reconcile."""

    condition: str
    spec: dict[str, Any] = field(default_factory=lambda: SMALLEST)
    change: Callable[[OperatorHarness], None] = lambda harness: None


def with_pod(component: Component = "speculative", **status: Any) -> Callable[[OperatorHarness], None]:
    """Add a pod of a component."""

    def change(harness: OperatorHarness) -> None:
        harness.cluster.objects["Pod", "serving", "p"] = pod("p", component, **status)

    return change


def unscheduled(message: str, component: Component = "speculative") -> Callable[[OperatorHarness], None]:
    return with_pod(component, conditions=[{"type": "PodScheduled", "status": "False", "message": message}])


def calibration_ended(exit_code: int, message: str) -> Callable[[OperatorHarness], None]:
    terminated = {"exitCode": exit_code, "message": message, "finishedAt": "2026-01-01T03:00:10Z"}
    return with_pod("calibration", containerStatuses=[{"name": "c", "state": {"terminated": terminated}}])


def missing(kind: str, name: str, error: ClusterError) -> Callable[[OperatorHarness], None]:
    """Delete an object, which the API server then refuses to create."""

    def change(harness: OperatorHarness) -> None:
        del harness.cluster.objects[kind, "serving", name]
        harness.cluster.fail["apply", kind] = error

    return change


def measured(problem: str) -> Callable[[OperatorHarness], None]:
    def change(harness: OperatorHarness) -> None:
        harness.seen.unmeasured[KEY] = problem

    return change


def reported(**reports: Any) -> Callable[[OperatorHarness], None]:
    """The engines and gateways have reported this of a common prefix cache."""

    def change(harness: OperatorHarness) -> None:
        harness.seen.cache_health[KEY] = CacheHealth(**reports)

    return change


def shared(speculation: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {**PREFIX_CACHE, "pools": {"speculative": {"speculation": speculation}}, **spec}


MONITORED = {**SMALLEST, "telemetry": {"serviceMonitor": {}}}
BUDGET = {**SMALLEST, "gpuBudget": {"gpus": 4}}
CALIBRATED = {**SMALLEST, "routing": {"calibration": {}}}
RESULT = json.dumps({"policy": "TotalLength", "objective": "session", "seconds": 1.25, "verdict": "it is"})
BOTH = frozenset(POOLS)
UNAVAILABLE = ClusterError("the API server is unavailable")

CASES = {
    "ServiceMonitorCreated": Case("Monitored", MONITORED),
    "CRDNotInstalled": Case(
        "Monitored", MONITORED, missing("ServiceMonitor", "qwen-metrics", NotInstalledError("no such kind"))
    ),
    "NotCreated": Case("Monitored", MONITORED, missing("ServiceMonitor", "qwen-metrics", UNAVAILABLE)),
    "NotReported": Case("PrefixCacheShared", PREFIX_CACHE),
    "BothWays": Case("PrefixCacheShared", PREFIX_CACHE, reported(reporting=BOTH)),
    "AlgorithmNotSupported": Case("PrefixCacheShared", shared({"algorithm": "Eagle3", "draftModel": "d"})),
    "VersionNotSupported": Case("PrefixCacheShared", {**PREFIX_CACHE, "engine": {"version": "0.5.24"}}),
    "RuntimeNotSupported": Case("PrefixCacheShared", {**VLLM, "prefixCache": PREFIX_CACHE["prefixCache"]}),
    "LoRAEnabled": Case(
        "PrefixCacheShared",
        shared(
            {"algorithm": "Ngram"},
            model={**SMALLEST["model"], "adapters": [{"name": "sql", "path": "org/sql"}]},
        ),
    ),
    "EngineNotSharing": Case("PrefixCacheShared", PREFIX_CACHE, reported(unshared={"greedy": "LoRA"})),
    "GeometryDiffers": Case("PrefixCacheShared", PREFIX_CACHE, reported(different=True)),
    "StorageFull": Case("PrefixCacheServing", PREFIX_CACHE, reported(full={"greedy"})),
    "StorageFailing": Case("PrefixCacheServing", PREFIX_CACHE, reported(failing={"greedy"})),
    "StorageSlow": Case("PrefixCacheServing", PREFIX_CACHE, reported(slow={"greedy": "1 GB/s"})),
    "StorageServing": Case("PrefixCacheServing", PREFIX_CACHE, reported(judged=BOTH)),
    "StorageNotServing": Case(
        "PrefixCacheServing", PREFIX_CACHE, reported(judged=BOTH, unserved=frozenset({"greedy"}))
    ),
    "GatewaysUnreachable": Case(
        "PrefixCacheServing", PREFIX_CACHE, reported(unreachable="no gateway is ready")
    ),
    "NotMeasured": Case("DemandMeasured", BUDGET),
    "Measured": Case("DemandMeasured", BUDGET, measured("")),
    "NotCalibrated": Case("RoutingCalibrated", CALIBRATED),
    "CalibrationFailed": Case("RoutingCalibrated", CALIBRATED, calibration_ended(1, "no turns")),
    "Recommended": Case("RoutingCalibrated", CALIBRATED, calibration_ended(0, RESULT)),
    "ImagePullFailed": Case(
        "RoutingCalibrated",
        CALIBRATED,
        with_pod("calibration", containerStatuses=[waiting("ImagePullBackOff")]),
    ),
    "Unschedulable": Case("RoutingCalibrated", CALIBRATED, unscheduled("1 Insufficient cpu", "calibration")),
}


LARGE = {**SMALLEST, "model": {"name": "Qwen/Qwen2.5-72B-Instruct"}}
SUM = r"the spec is valid; 135\.4 GiB \(Qwen/Qwen2\.5-72B-Instruct\) \+ .* do not fit into 80\.0 GiB.*"
SMALL_INSTANCE = {"nodePool": {"mig": {"profile": "1g.10gb"}}}
WARNINGS: dict[str, tuple[dict[str, Any], str]] = {
    "models that fit": (SMALLEST, "the spec is valid"),
    "too large": (LARGE, SUM),
    "too large for vLLM": ({**LARGE, "engine": {"runtime": "VLLM"}}, SUM),
    "too large for an instance": (
        {**SMALLEST, **SMALL_INSTANCE},
        r"the spec is valid; 14\.2 GiB .* do not fit into 10\.0 GiB.*",
    ),
}


@pytest.mark.parametrize(("spec", "message"), WARNINGS.values(), ids=WARNINGS.keys())
async def test_accepted_spec_warns_of_models_that_do_not_fit(spec: dict[str, Any], message: str) -> None:
    harness = OperatorHarness(spec)
    await harness.reconcile()
    assert re.fullmatch(message, harness.condition("SpecValid")["message"])


@pytest.mark.parametrize(("reason", "case"), CASES.items(), ids=CASES.keys())
async def test_optional_feature_is_reported_and_ready_names_it_only_if_it_does_not_work(
    reason: str, case: Case
) -> None:
    harness = OperatorHarness(case.spec)
    await harness.reconcile()
    harness.rolled_out()
    case.change(harness)
    with suppress(ClusterError):
        await harness.reconcile()
    ready, optional = harness.condition("Ready"), harness.condition(case.condition)
    assert optional["reason"] == reason
    assert ready["status"] == "True"
    assert (optional["message"] in ready["message"]) == (optional["status"] == "False")


async def test_external_session_store_is_not_observed() -> None:
    store = {"urlSecretRef": {"name": "s", "key": "url"}}
    harness = OperatorHarness({**SMALLEST, "sessionStore": store})
    await harness.reconcile()
    assert harness.condition("SessionStoreReady")["reason"] == "External"
