"""Volumes that cannot be mounted are diagnosed from the kubelet's events."""

from typing import Any

import pytest

from dps_operator.diagnose import Problem
from dps_operator.errors import ClusterError
from dps_operator.mounts import MountWatch
from dps_testkit.operator.routers import SMALLEST
from tests.operator.harness import KEY, OperatorHarness
from tests.operator.objects import Manifest, pod, waiting

CREATING = waiting("ContainerCreating")
NO_SECRET = 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found'
ATTACHED = 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) other'
SUMMARY = "Unable to attach or mount volumes: unmounted volumes=[keys]: timed out waiting for the condition"


def event(message: str, time: str = "2026-01-01T00:00:00Z", **change: Any) -> Manifest:
    """A Warning of the kubelet about the gateway's pod."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"p.{time}.{len(message)}", "namespace": "serving"},
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": "serving"},
        "type": "Warning",
        "reason": "FailedMount",
        "message": message,
        "lastTimestamp": time,
        **change,
    }


LATER = "2026-01-01T00:02:00Z"
CASES: dict[str, tuple[list[Manifest], Problem]] = {
    "missing Secret": (
        [event(NO_SECRET)],
        Problem("ConfigMissing", 'pod p cannot start: secret "keys" not found'),
    ),
    "volume attached elsewhere": (
        [event(ATTACHED, reason="FailedAttachVolume")],
        Problem("WaitingForVolume", f"pod p is waiting for its volume: {ATTACHED}"),
    ),
    "later message without the cause": (
        [event(NO_SECRET), event(SUMMARY, LATER)],
        Problem("ConfigMissing", 'pod p cannot start: secret "keys" not found'),
    ),
    "failure after an image was pulled, because the node has restarted": (
        [event("Pulling image", reason="Pulling", type="Normal"), event(NO_SECRET, LATER)],
        Problem("ConfigMissing", 'pod p cannot start: secret "keys" not found'),
    ),
    "image that is pulled after a failure": (
        [event(NO_SECRET), event("Pulling image", LATER, reason="Pulling", type="Normal")],
        Problem("Starting", "pod p is starting"),
    ),
    "no event": ([], Problem("Starting", "pod p is starting")),
}


async def harness_with(*events: Manifest, **status: Any) -> tuple[OperatorHarness, MountWatch]:
    """A harness whose gateway has one pod with this status, after the first reconcile."""
    harness = OperatorHarness(SMALLEST)
    harness.cluster.objects["Pod", "serving", "p"] = pod("p", "gateway", **status)
    for one in events:
        harness.cluster.store(one)
    await harness.reconcile()
    return harness, MountWatch(harness.cluster, harness.seen)


@pytest.mark.parametrize(("events", "wanted"), CASES.values(), ids=CASES.keys())
async def test_pod_that_waits_for_a_volume_is_diagnosed(events: list[Manifest], wanted: Problem) -> None:
    harness, watch = await harness_with(*events, containerStatuses=[CREATING])
    changed = await watch.once()
    assert changed == ([] if wanted.reason == "Starting" else [KEY])
    assert await watch.once() == []
    assert [one.problem for one in harness.seen.pods(KEY)] == [wanted]


@pytest.mark.parametrize(
    "status",
    [
        {"containerStatuses": [CREATING | {"state": {"running": {}}}]},
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]},
    ],
    ids=["started", "waiting for a GPU"],
)
async def test_no_events_are_listed_for_pods_that_wait_for_no_volume(status: Manifest) -> None:
    harness, watch = await harness_with(event(NO_SECRET), **status)
    lists = harness.cluster.calls["list"]
    assert await watch.once() == []
    assert harness.cluster.calls["list"] == lists


READY_TO_START = {"type": "PodReadyToStartContainers", "status": "True"}
ENDED: dict[str, Any] = {"lastState": {"terminated": {"exitCode": 1, "message": "no memory"}}}
OTHER_PROBLEMS: dict[str, tuple[Manifest, str]] = {
    "volumes that are mounted": (
        {"containerStatuses": [CREATING], "conditions": [READY_TO_START]},
        "Starting",
    ),
    "missing Secret of a variable": (
        {"containerStatuses": [waiting("CreateContainerConfigError")]},
        "ConfigMissing",
    ),
    "container that ended": (
        {"containerStatuses": [waiting("CrashLoopBackOff", **ENDED)]},
        "CrashLooping",
    ),
}


@pytest.mark.parametrize(("status", "reason"), OTHER_PROBLEMS.values(), ids=OTHER_PROBLEMS.keys())
async def test_older_failure_to_mount_does_not_hide_the_problem_of_a_pod(
    status: Manifest, reason: str
) -> None:
    harness, watch = await harness_with(event(ATTACHED), containerStatuses=[CREATING])
    await watch.once()
    harness.cluster.objects["Pod", "serving", "p"] = pod("p", "gateway", **status)
    await harness.list_objects()
    assert [one.problem.reason for one in harness.seen.pods(KEY) if one.problem] == [reason]
    assert await watch.once() == [KEY]
    assert harness.seen.unmounted == {}


async def test_result_ends_with_the_pod() -> None:
    harness, watch = await harness_with(event(NO_SECRET), containerStatuses=[CREATING])
    assert await watch.once() == [KEY]
    del harness.cluster.objects["Pod", "serving", "p"]
    await harness.list_objects()
    assert await watch.once() == [KEY]
    assert harness.seen.unmounted == {}


async def test_failed_listing_keeps_the_last_result() -> None:
    harness, watch = await harness_with(event(NO_SECRET), containerStatuses=[CREATING])
    await watch.once()
    harness.cluster.fail["list", "Event"] = ClusterError("the API server is unavailable")
    with pytest.raises(ClusterError):
        await watch.once()
    assert KEY in harness.seen.unmounted
