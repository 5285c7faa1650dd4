"""Diagnosis of pods that are not ready."""

from typing import Any

import pytest

from dps_operator.diagnose import Problem, most_severe, problem
from dps_operator.objects import COMPONENT_LABEL
from tests.operator.objects import READY, Manifest, pod, waiting


def unscheduled(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."
NO_VOLUME = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."
LOG = "Loading weights\nTraceback\nRuntimeError: Not enough memory\n\n"
ENDED = {"terminated": {"exitCode": 1, "reason": "Error", "message": LOG}}
NO_FILES = {"terminated": {"exitCode": 1, "message": "s3://m/q contains no file of the model\n"}}
NO_DRIVER = "OCI runtime create failed: error running hook\nnvidia-container-cli: initialization error\n"
NOT_STARTED = "container engine of pod p cannot be started: nvidia-container-cli: initialization error"
RUNNING = {"name": "engine", "image": "i", "ready": False, "started": False, "state": {"running": {}}}


def engine(status: Manifest, **init: Any) -> Manifest:
    """A pod whose engine has this container status."""
    return pod(containerStatuses=[status], **init)


def crashed(**terminated: Any) -> Manifest:
    """The status of a container that waits for its restart."""
    return waiting("CrashLoopBackOff", "back-off 5m", lastState={"terminated": terminated})


CASES: dict[str, tuple[Manifest, str, str]] = {
    "no GPU": (
        pod(**unscheduled(NO_GPU)),
        "WaitingForGPU",
        "pod p is waiting for a node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu; "
        "add a node that spec.nodePool selects and that has a free GPU, or change spec.nodePool",
    ),
    "no node for the gateway": (
        pod(component="gateway", **unscheduled("0/1 nodes are available: 1 Insufficient cpu.")),
        "Unschedulable",
        "pod p is waiting for a node: 0/1 nodes are available: 1 Insufficient cpu",
    ),
    "no volume": (
        pod(component="redis", **unscheduled(NO_VOLUME)),
        "WaitingForVolume",
        "pod p is waiting for its volume: 0/2 nodes are available: pod has unbound immediate "
        "PersistentVolumeClaims; check the storage class and its provisioner",
    ),
    "no image": (
        engine(waiting("ImagePullBackOff")),
        "ImagePullFailed",
        "pod p cannot pull sglang:1; check the image's name and the pull secret",
    ),
    "missing Secret": (
        engine(waiting("CreateContainerConfigError", 'secret "hub" not found')),
        "ConfigMissing",
        'pod p cannot start: secret "hub" not found',
    ),
    "GPU runtime that cannot start the container": (
        engine(waiting("RunContainerError", NO_DRIVER)),
        "ContainerNotStarted",
        NOT_STARTED,
    ),
    "GPU runtime that could not start the container before": (
        engine(crashed(exitCode=128, reason="StartError", message=NO_DRIVER)),
        "ContainerNotStarted",
        NOT_STARTED,
    ),
    "container that the runtime cannot create": (
        engine(waiting("CreateContainerError")),
        "ContainerNotStarted",
        "container engine of pod p cannot be started: CreateContainerError",
    ),
    "restarted after a crash": (
        engine(RUNNING | {"lastState": ENDED}),
        "CrashLooping",
        "container engine of pod p ended with exit code 1: RuntimeError: Not enough memory",
    ),
    "killed for lack of memory, with the last log line": (
        engine(crashed(exitCode=137, reason="OOMKilled", message=LOG)),
        "CrashLooping",
        "container engine of pod p ended with exit code 137 (OOMKilled): RuntimeError: Not enough memory",
    ),
    "download of the model failed": (
        engine(
            waiting("PodInitializing"),
            initContainerStatuses=[waiting("CrashLoopBackOff", name="model-source", lastState=NO_FILES)],
        ),
        "CrashLooping",
        "container model-source of pod p ended with exit code 1: s3://m/q contains no file of the model",
    ),
    "waiting for the engine with which it shares a GPU": (
        engine(waiting("PodInitializing"), initContainerStatuses=[RUNNING | {"name": "wait-for-neighbour"}]),
        "Starting",
        "pod p starts its engine when that of the greedy pool is ready, because both share a GPU",
    ),
    "loading": (engine(RUNNING), "LoadingModel", "pod p is loading its model"),
    "starting gateway": (
        pod(component="gateway", containerStatuses=[RUNNING]),
        "Starting",
        "pod p is starting",
    ),
}


@pytest.mark.parametrize(("body", "reason", "message"), CASES.values(), ids=CASES.keys())
def test_pod_is_diagnosed(body: Manifest, reason: str, message: str) -> None:
    component = body["metadata"]["labels"][COMPONENT_LABEL]
    assert problem(body, component) == Problem(reason, message)


HEALTHY: dict[str, Manifest] = {
    "ready": pod(conditions=[READY], containerStatuses=[RUNNING | {"ready": True}]),
    "ready again after a crash": pod(
        conditions=[READY], containerStatuses=[RUNNING | {"ready": True, "lastState": ENDED}]
    ),
    "terminating": pod() | {"metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
}


@pytest.mark.parametrize("body", HEALTHY.values(), ids=HEALTHY.keys())
def test_pod_without_a_problem_has_no_diagnosis(body: Manifest) -> None:
    assert problem(body, "speculative") is None


def test_most_severe_problem_is_reported() -> None:
    loading, crash = Problem("LoadingModel", "a"), Problem("CrashLooping", "z")
    assert most_severe([loading, crash]) == crash
    assert most_severe([]) is None
