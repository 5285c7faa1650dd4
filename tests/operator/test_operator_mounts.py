"""Volumes that cannot be mounted are diagnosed from the kubelet's events."""

from typing import Any

import pytest

from dps_operator.errors import ClusterError
from dps_operator.mounts import POLL_SECONDS, MountWatch, pause_after
from dps_operator.status.diagnose import Problem
from dps_testkit.operator.harness import KEY, OperatorHarness
from dps_testkit.operator.objects import Manifest, pod, waiting
from dps_testkit.operator.routers import SMALLEST

CREATING = {
    "name": "gateway",
    "image": "i",
    "ready": False,
    "state": {"waiting": {"reason": "ContainerCreating"}},
}
NO_SECRET = 'MountVolume.SetUp failed for volume "keys" : secret "keys" not found'
NO_KEY = 'MountVolume.SetUp failed for volume "redis-ca" : references non-existent secret key: ca.crt'
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
    "missing key of a Secret": (
        [event(NO_KEY)],
        Problem("ConfigMissing", "pod p cannot start: references non-existent secret key: ca.crt"),
    ),
    "volume attached elsewhere": (
        [event(ATTACHED, reason="FailedAttachVolume")],
        Problem("WaitingForVolume", f"pod p is waiting for its volume: {ATTACHED}"),
    ),
    "later message without the cause": (
        [event(NO_SECRET), event(SUMMARY, LATER)],
        Problem("ConfigMissing", 'pod p cannot start: secret "keys" not found'),
    ),
    "newest of several causes": (
        [event(NO_KEY, LATER), event(NO_SECRET)],
        Problem("ConfigMissing", "pod p cannot start: references non-existent secret key: ca.crt"),
    ),
    "failure after an image was pulled, because the node has restarted": (
        [event("Pulling image", reason="Pulling", type="Normal"), event(NO_SECRET, LATER)],
        Problem("ConfigMissing", 'pod p cannot start: secret "keys" not found'),
    ),
    "image that is pulled after a failure": (
        [event(NO_SECRET), event("Pulling image", LATER, reason="Pulling", type="Normal")],
        Problem("Starting", "pod p is starting"),
    ),
    "another event": ([event("x", reason="FailedKillPod")], Problem("Starting", "pod p is starting")),
    "no event": ([], Problem("Starting", "pod p is starting")),
}


NAMELESS = event(NO_SECRET, LATER, involvedObject={"kind": "Pod"})


async def test_event_about_a_pod_without_a_name_is_ignored() -> None:
    harness, watch = await harness_with(event(NO_SECRET), NAMELESS, containerStatuses=[CREATING])
    assert await watch.once() == [KEY]
    assert harness.seen.unmounted == {KEY: {"p": NO_SECRET}}


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


async def test_condition_of_the_gateway_names_the_missing_secret() -> None:
    harness, watch = await harness_with(event(NO_SECRET), containerStatuses=[CREATING])
    assert harness.condition("GatewayReady")["reason"] == "Starting"
    for key in await watch.once():
        await harness.reconciler.reconcile(key)
    condition = harness.condition("GatewayReady")
    assert (condition["reason"], condition["message"]) == (
        "ConfigMissing",
        'pod p cannot start: secret "keys" not found',
    )
    assert harness.condition("Ready")["status"] == "False"


async def test_started_pod_is_not_judged_by_older_events() -> None:
    running = CREATING | {"state": {"running": {}}}
    harness, watch = await harness_with(event(NO_SECRET), containerStatuses=[running])
    lists = harness.cluster.calls["list"]
    assert await watch.once() == []
    assert harness.cluster.calls["list"] == lists, "no events are listed without pods that wait"


READY_TO_START = {"type": "PodReadyToStartContainers", "status": "True"}
ENDED: dict[str, Any] = {"lastState": {"terminated": {"exitCode": 1, "message": "no memory"}}}
OTHER_PROBLEMS: dict[str, tuple[Manifest, str]] = {
    "volumes that are mounted": (
        {"containerStatuses": [CREATING], "conditions": [READY_TO_START]},
        "Starting",
    ),
    "image that cannot be pulled": (
        {"containerStatuses": [waiting("ImagePullBackOff")]},
        "ImagePullFailed",
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


async def test_no_events_are_listed_for_a_pod_that_waits_for_a_gpu() -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    harness, watch = await harness_with(event(NO_SECRET), conditions=[unscheduled])
    lists = harness.cluster.calls["list"]
    assert await watch.once() == []
    assert harness.cluster.calls["list"] == lists


def test_listing_takes_a_twentieth_of_the_time_at_most() -> None:
    assert pause_after(0.01) == POLL_SECONDS
    assert pause_after(3.0) == 60.0


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
