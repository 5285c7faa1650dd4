"""Every reason of every condition is reported in a case below, and explained in docs/troubleshooting.md."""

import ast
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from dps_engines.pools import POOLS, PoolName
from dps_operator.errors import ClusterError, NotInstalledError
from dps_operator.prefix_cache.engines import EngineReports
from dps_operator.prefix_cache.health import CacheHealth
from dps_operator.resources import Component
from dps_operator.status.diagnose import SEVERITY
from dps_testkit.operator.harness import KEY, OperatorHarness
from dps_testkit.operator.objects import pod, waiting
from dps_testkit.operator.routers import MOONCAKE, PREFIX_CACHE, SMALLEST, VLLM
from dps_testkit.paths import ROOT

SOURCES = (
    *(ROOT / "operator/dps_operator/status").glob("*.py"),
    ROOT / "engines/dps_engines/sglang/prefix_cache.py",
    ROOT / "engines/dps_engines/vllm/runtime.py",
)
"""The modules that contain reasons."""
REASON_POSITION = {"Condition": 2, "Problem": 0, "Unshareable": 0}
"""The position of the reason among the arguments of each class that has one."""


def calls() -> Iterator[tuple[str, ast.Call]]:
    """The calls of the classes that have a reason, with their names."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in REASON_POSITION
            ):
                yield node.func.id, node


def constant(node: ast.expr) -> str | None:
    """The value of a literal string; None for other expressions."""
    return str(node.value) if isinstance(node, ast.Constant) else None


def reasons() -> set[str]:
    found = {constant(call.args[REASON_POSITION[name]]) for name, call in calls()}
    return {*SEVERITY, *filter(None, found)}


def pairs() -> set[tuple[str, str]]:
    """The conditions and reasons that are written together in the modules.

    The components, whose conditions have the same reasons, are left out.
    """
    found = set()
    for name, call in calls():
        condition = {"Condition": constant(call.args[0]), "Unshareable": "PrefixCacheShared"}.get(name)
        reason = constant(call.args[REASON_POSITION[name]])
        if condition and reason:
            found.add((condition, reason))
    return found


def test_reasons_are_found() -> None:
    assert {"Serving", "Settled", "ProgressDeadlineExceeded", "WaitingForGPU"} <= reasons()
    assert {("Monitored", "NotCreated"), ("PrefixCacheShared", "LoRAEnabled")} <= pairs()


@dataclass(frozen=True)
class Case:
    """How a reason comes about: a spec, and a change of the cluster after the first reconcile."""

    condition: str
    spec: dict[str, Any] = field(default_factory=lambda: SMALLEST)
    change: Callable[[OperatorHarness], None] = lambda harness: None


def serve(harness: OperatorHarness) -> None:
    """Make every component ready."""
    harness.rolled_out()


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


def deployment_condition(**condition: str) -> Callable[[OperatorHarness], None]:
    def change(harness: OperatorHarness) -> None:
        harness.object("Deployment", "qwen-speculative")["status"] = {"conditions": [condition]}

    return change


def autoscaler_status(status: str) -> Callable[[OperatorHarness], None]:
    def change(harness: OperatorHarness) -> None:
        harness.object("HorizontalPodAutoscaler", "qwen-gateway")["status"] = {
            "conditions": [{"type": "ScalingActive", "status": status}]
        }

    return change


def route_status(status: str) -> Callable[[OperatorHarness], None]:
    def change(harness: OperatorHarness) -> None:
        accepted = {"type": "Accepted", "status": status, "reason": "R", "message": "m"}
        harness.object("HTTPRoute", "qwen-gateway")["status"] = {"parents": [{"conditions": [accepted]}]}

    return change


def some_ready(harness: OperatorHarness) -> None:
    harness.object("Deployment", "qwen-speculative")["status"] = {"replicas": 2, "availableReplicas": 1}


def scaled_to_zero(harness: OperatorHarness) -> None:
    harness.object("Deployment", "qwen-speculative")["spec"]["replicas"] = 0


def missing(kind: str, name: str, error: ClusterError) -> Callable[[OperatorHarness], None]:
    """Delete an object, which the API server then refuses to create."""

    def change(harness: OperatorHarness) -> None:
        del harness.cluster.objects[kind, "serving", name]
        harness.cluster.fail["apply", kind] = error

    return change


def measured(problem: str) -> Callable[[OperatorHarness], None]:
    def change(harness: OperatorHarness) -> None:
        harness.allocations.unmeasured[KEY] = problem

    return change


def fetched(*unserved: PoolName) -> Callable[[OperatorHarness], None]:
    """Both pools had enough tokens to fetch, and these fetched too few."""

    def change(harness: OperatorHarness) -> None:
        harness.cache_healths[KEY] = CacheHealth(judged=frozenset(POOLS), unserved=frozenset(unserved))

    return change


def unreachable(problem: str) -> Callable[[OperatorHarness], None]:
    """The gateways cannot be asked what their engines fetch."""

    def change(harness: OperatorHarness) -> None:
        harness.cache_healths[KEY] = CacheHealth(unreachable=problem)

    return change


def reported(**reports: Any) -> Callable[[OperatorHarness], None]:
    """The engines have reported this."""

    def change(harness: OperatorHarness) -> None:
        harness.cache_healths[KEY] = CacheHealth(reports=EngineReports(**reports))

    return change


def pools(**speculative: Any) -> dict[str, Any]:
    return {**SMALLEST, "pools": {"speculative": {**SMALLEST["pools"]["speculative"], **speculative}}}


def shared(speculation: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {**PREFIX_CACHE, "pools": {"speculative": {"speculation": speculation}}, **spec}


def waiting_engine(reason: str) -> Callable[[OperatorHarness], None]:
    return with_pod(containerStatuses=[waiting(reason)])


SPECULATIVE = "SpeculativePoolReady"
RUNNING = {"name": "engine", "image": "i", "ready": False, "state": {"running": {}}}
CRASHED = {"name": "engine", "image": "i", "state": {"terminated": {"exitCode": 1}}}
NGRAM = {"algorithm": "Ngram"}
AUTOSCALED = {**SMALLEST, "gateway": {"autoscaling": {"maxReplicas": 4}}}
ROUTED = {**SMALLEST, "gateway": {"httpRoute": {"parentRefs": [{"name": "edge"}]}}}
MONITORED = {**SMALLEST, "telemetry": {"serviceMonitor": {}}}
BUDGET = {**SMALLEST, "gpuBudget": {"gpus": 4}}
CALIBRATED = {**SMALLEST, "routing": {"calibration": {}}}
RESULT = json.dumps({"policy": "TotalLength", "objective": "session", "seconds": 1.25, "verdict": "it is"})
STALLED = deployment_condition(type="Progressing", status="False", reason="ProgressDeadlineExceeded")
UNAVAILABLE = ClusterError("the API server is unavailable")

CASES = {
    "Accepted": Case("SpecValid"),
    "InvalidSpec": Case("SpecValid", {**SMALLEST, "engine": {"args": ["--port", "1"]}}),
    "Serving": Case("Ready", change=serve),
    "AllReplicasReady": Case(SPECULATIVE, change=serve),
    "SomeReplicasReady": Case(SPECULATIVE, pools(replicas=2), some_ready),
    "NotCreated": Case(SPECULATIVE, change=missing("Deployment", "qwen-speculative", UNAVAILABLE)),
    "Suspended": Case(SPECULATIVE, {**SMALLEST, "suspend": True}),
    "ScaledToZero": Case(SPECULATIVE, pools(scaling="External"), scaled_to_zero),
    "PodsForbidden": Case(SPECULATIVE, change=deployment_condition(type="ReplicaFailure", status="True")),
    "Starting": Case(SPECULATIVE),
    "LoadingModel": Case(SPECULATIVE, change=with_pod(containerStatuses=[RUNNING])),
    "CrashLooping": Case(SPECULATIVE, change=with_pod(containerStatuses=[CRASHED])),
    "ImagePullFailed": Case(SPECULATIVE, change=waiting_engine("ImagePullBackOff")),
    "ConfigMissing": Case(SPECULATIVE, change=waiting_engine("CreateContainerConfigError")),
    "ContainerNotStarted": Case(SPECULATIVE, change=waiting_engine("RunContainerError")),
    "WaitingForGPU": Case(SPECULATIVE, change=unscheduled("3 Insufficient nvidia.com/gpu")),
    "WaitingForVolume": Case(SPECULATIVE, change=unscheduled("unbound PersistentVolumeClaims")),
    "Unschedulable": Case("GatewayReady", change=unscheduled("1 Insufficient cpu", "gateway")),
    "External": Case(
        "SessionStoreReady", {**SMALLEST, "sessionStore": {"urlSecretRef": {"name": "s", "key": "url"}}}
    ),
    "NotEvaluated": Case("AutoscalingActive", AUTOSCALED),
    "AutoscalerFailed": Case("AutoscalingActive", AUTOSCALED, autoscaler_status("False")),
    "AutoscalersActive": Case("AutoscalingActive", AUTOSCALED, autoscaler_status("True")),
    "RouteServed": Case("RouteAccepted", ROUTED, route_status("True")),
    "RouteRejected": Case("RouteAccepted", ROUTED, route_status("False")),
    "ServiceMonitorCreated": Case("Monitored", MONITORED),
    "CRDNotInstalled": Case(
        "Monitored", MONITORED, missing("ServiceMonitor", "qwen-metrics", NotInstalledError("no such kind"))
    ),
    "NotReported": Case("PrefixCacheShared", PREFIX_CACHE),
    "BothWays": Case("PrefixCacheShared", PREFIX_CACHE, reported(reporting=frozenset(POOLS))),
    "AlgorithmNotSupported": Case("PrefixCacheShared", shared({"algorithm": "Eagle3", "draftModel": "d"})),
    "VersionNotSupported": Case("PrefixCacheShared", {**PREFIX_CACHE, "engine": {"version": "0.5.22"}}),
    "RuntimeNotSupported": Case("PrefixCacheShared", {**VLLM, "prefixCache": PREFIX_CACHE["prefixCache"]}),
    "LoRAEnabled": Case(
        "PrefixCacheShared",
        shared(NGRAM, model={**SMALLEST["model"], "adapters": [{"name": "sql", "path": "org/sql"}]}),
    ),
    "ArgumentsDiffer": Case(
        "PrefixCacheShared",
        {
            **PREFIX_CACHE,
            "pools": {**PREFIX_CACHE["pools"], "greedy": {"args": ["--kv-cache-dtype", "fp8_e5m2"]}},
        },
    ),
    "EngineNotSharing": Case("PrefixCacheShared", PREFIX_CACHE, reported(unshared={"greedy": "LoRA"})),
    "GeometryDiffers": Case("PrefixCacheShared", PREFIX_CACHE, reported(different=True)),
    "OneWay": Case("PrefixCacheShared", PREFIX_CACHE, reported(write_only={"speculative": "a draft"})),
    "StorageFull": Case("PrefixCacheServing", PREFIX_CACHE, reported(full=frozenset({"greedy"}))),
    "StorageFailing": Case("PrefixCacheServing", PREFIX_CACHE, reported(failing=frozenset({"greedy"}))),
    "StorageSlow": Case("PrefixCacheServing", PREFIX_CACHE, reported(slow={"greedy": "1 GB/s"})),
    "StorageServing": Case("PrefixCacheServing", PREFIX_CACHE, fetched()),
    "MasterNotReady": Case("PrefixCacheServing", MOONCAKE),
    "StorageNotServing": Case("PrefixCacheServing", PREFIX_CACHE, fetched("greedy")),
    "NotMeasured": Case("DemandMeasured", BUDGET),
    "GatewaysUnreachable": Case("DemandMeasured", BUDGET, measured("no gateway is ready")),
    "Measured": Case("DemandMeasured", BUDGET, measured("")),
    "NotCalibrated": Case("RoutingCalibrated", CALIBRATED),
    "CalibrationFailed": Case("RoutingCalibrated", CALIBRATED, calibration_ended(1, "no turns")),
    "Recommended": Case("RoutingCalibrated", CALIBRATED, calibration_ended(0, RESULT)),
    "Applied": Case(
        "RoutingCalibrated",
        {**SMALLEST, "routing": {"calibration": {"apply": True}}},
        calibration_ended(0, RESULT),
    ),
    "RollingOut": Case("Progressing"),
    "Settled": Case("Progressing", change=serve),
    "Paused": Case("Progressing", {**SMALLEST, "paused": True}),
    "ProgressDeadlineExceeded": Case("Progressing", change=STALLED),
    "Retrying": Case("Progressing", change=missing("Deployment", "qwen-greedy", UNAVAILABLE)),
}
REUSED_REASONS = {
    "NotEvaluated": Case("RouteAccepted", ROUTED),
    "ImagePullFailed": Case(
        "RoutingCalibrated",
        CALIBRATED,
        with_pod("calibration", containerStatuses=[waiting("ImagePullBackOff")]),
    ),
    "Unschedulable": Case("RoutingCalibrated", CALIBRATED, unscheduled("1 Insufficient cpu", "calibration")),
    "NotCreated": Case("Monitored", MONITORED, missing("ServiceMonitor", "qwen-metrics", UNAVAILABLE)),
    "NotMeasured": Case("PrefixCacheServing", PREFIX_CACHE),
    "GatewaysUnreachable": Case("PrefixCacheServing", PREFIX_CACHE, unreachable("no gateway is ready")),
}
"""Reasons in CASES that another condition has as well."""
EVERY = [*CASES.items(), *REUSED_REASONS.items()]


UNKNOWN_DRAFT = {"speculation": {"algorithm": "Eagle3", "draftModel": "org/head"}}
FITS = (
    "so it is assumed that the models fit into the GPUs, and the engines' own defaults limit their memory unless "
    "args do"
)
ASSUMED: dict[str, tuple[dict[str, Any], str]] = {
    "known models on known GPUs": (SMALLEST, ""),
    "unknown model": (
        {**SMALLEST, "model": {"name": "org/model"}},
        f"; the size of org/model is not known, {FITS}",
    ),
    "unknown models": (
        {"model": {"name": "org/model"}, "pools": {"speculative": UNKNOWN_DRAFT}},
        f"; the size of org/model and org/head is not known, {FITS}",
    ),
    "unknown GPUs": (
        {**SMALLEST, "nodePool": {"profile": "None"}},
        f"; the memory of the GPUs is not known, {FITS}",
    ),
}


@pytest.mark.parametrize(("spec", "assumption"), ASSUMED.values(), ids=ASSUMED.keys())
async def test_accepted_spec_says_what_is_assumed_about_memory(spec: dict[str, Any], assumption: str) -> None:
    harness = OperatorHarness(spec)
    await harness.reconcile()
    assert harness.condition("SpecValid")["message"] == f"the spec is valid{assumption}"


@pytest.mark.parametrize(
    ("reason", "case"), EVERY, ids=[f"{case.condition}-{reason}" for reason, case in EVERY]
)
async def test_reason_is_reported(reason: str, case: Case) -> None:
    harness = OperatorHarness(case.spec)
    await harness.reconcile()
    case.change(harness)
    with suppress(ClusterError):
        await harness.reconcile()
    assert harness.condition(case.condition)["reason"] == reason


def test_every_reason_of_every_condition_has_a_case() -> None:
    assert set(CASES) == reasons()
    assert pairs() <= {(case.condition, reason) for reason, case in EVERY}


PAGE = (ROOT / "docs/troubleshooting.md").read_text()


def sections() -> dict[str, str]:
    """The text of docs/troubleshooting.md about each condition; that about Ready precedes the first heading."""
    found = {}
    for section in f"## Ready\n{PAGE}".split("\n## "):
        heading, _, text = section.removeprefix("## ").partition("\n")
        for condition in heading.split(", "):
            found[condition] = text
    return found


SECTIONS = sections()


def named(text: str) -> set[str]:
    """The reasons, and other words in CamelCase, that a text marks as code."""
    return set(re.findall(r"`([A-Z]\w+)`", text))


@pytest.mark.parametrize(
    ("reason", "case"), EVERY, ids=[f"{case.condition}-{reason}" for reason, case in EVERY]
)
def test_every_reason_is_explained_in_the_section_of_its_condition(reason: str, case: Case) -> None:
    assert reason in named(SECTIONS[case.condition])


def rows() -> list[tuple[set[str], list[str]]]:
    """The reasons in the first column of each row of the page's tables, and the other columns."""
    cells = [
        [cell.strip() for cell in line.strip("|").split(" |")]
        for line in PAGE.splitlines()
        if line.startswith("| `")
    ]
    return [(named(first), others) for first, *others in cells]


def test_only_existing_reasons_are_explained() -> None:
    found = set().union(*(reasons for reasons, _ in rows()))
    assert len(found) > len(SEVERITY)
    assert found <= reasons()


@pytest.mark.parametrize(("names", "cells"), rows(), ids=[" ".join(sorted(names)) for names, _ in rows()])
def test_reason_that_is_a_problem_has_a_remedy(names: set[str], cells: list[str]) -> None:
    cause, remedy = cells
    assert remedy or cause.startswith("(True)") or names == {"Settled"}
