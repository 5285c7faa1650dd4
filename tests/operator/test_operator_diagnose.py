"""Diagnosis of pods that are not ready."""

from typing import Any

import pytest

from dps_operator.status.diagnose import Problem, most_severe, problem
from dps_testkit.operator.objects import READY, Manifest, pod, waiting


def unscheduled(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


NO_GPU = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available."
NO_VOLUME = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."
LOG = "Loading weights\nTraceback\nRuntimeError: Not enough memory\n\n"
ENDED = {"terminated": {"exitCode": 1, "reason": "Error", "message": LOG}}
NO_FILES = {"terminated": {"exitCode": 1, "message": "s3://m/q contains no file of the model\n"}}
NO_DRIVER = "OCI runtime create failed: error running hook\nnvidia-container-cli: initialization error\n"
NOT_STARTED = Problem(
    "ContainerNotStarted",
    "container engine of pod p cannot be started: nvidia-container-cli: initialization error",
)
RUNNING = {"name": "engine", "image": "i", "ready": False, "started": False, "state": {"running": {}}}

CASES: dict[str, tuple[Manifest, str, Problem | None]] = {
    "no GPU": (
        pod(**unscheduled(NO_GPU)),
        "speculative",
        Problem(
            "WaitingForGPU",
            "pod p is waiting for a node: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu; "
            "add a node that spec.nodePool selects and that has a free GPU, or change spec.nodePool",
        ),
    ),
    "no node for the gateway": (
        pod(component="gateway", **unscheduled("0/1 nodes are available: 1 Insufficient cpu.")),
        "gateway",
        Problem("Unschedulable", "pod p is waiting for a node: 0/1 nodes are available: 1 Insufficient cpu"),
    ),
    "no volume": (
        pod(component="redis", **unscheduled(NO_VOLUME)),
        "redis",
        Problem(
            "WaitingForVolume",
            "pod p is waiting for its volume: 0/2 nodes are available: pod has unbound immediate "
            "PersistentVolumeClaims; check the storage class and its provisioner",
        ),
    ),
    "no image": (
        pod(containerStatuses=[waiting("ImagePullBackOff")]),
        "speculative",
        Problem("ImagePullFailed", "pod p cannot pull sglang:1; check the image's name and the pull secret"),
    ),
    "missing Secret": (
        pod(containerStatuses=[waiting("CreateContainerConfigError", 'secret "hub" not found')]),
        "speculative",
        Problem("ConfigMissing", 'pod p cannot start: secret "hub" not found'),
    ),
    "GPU runtime that cannot start the container": (
        pod(containerStatuses=[waiting("RunContainerError", NO_DRIVER)]),
        "speculative",
        NOT_STARTED,
    ),
    "GPU runtime that could not start the container before": (
        pod(
            containerStatuses=[
                waiting(
                    "CrashLoopBackOff",
                    "back-off 5m",
                    lastState={"terminated": {"exitCode": 128, "reason": "StartError", "message": NO_DRIVER}},
                )
            ]
        ),
        "speculative",
        NOT_STARTED,
    ),
    "container that the runtime cannot create": (
        pod(containerStatuses=[waiting("CreateContainerError")]),
        "speculative",
        Problem("ContainerNotStarted", "container engine of pod p cannot be started: CreateContainerError"),
    ),
    "crash loop with the last log line": (
        pod(containerStatuses=[waiting("CrashLoopBackOff", "back-off 5m", lastState=ENDED)]),
        "speculative",
        Problem(
            "CrashLooping",
            "container engine of pod p ended with exit code 1: RuntimeError: Not enough memory",
        ),
    ),
    "restarted after a crash": (
        pod(containerStatuses=[RUNNING | {"lastState": ENDED}]),
        "speculative",
        Problem(
            "CrashLooping",
            "container engine of pod p ended with exit code 1: RuntimeError: Not enough memory",
        ),
    ),
    "killed for lack of memory": (
        pod(
            containerStatuses=[
                waiting(
                    "CrashLoopBackOff",
                    lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": LOG}},
                )
            ]
        ),
        "speculative",
        Problem(
            "CrashLooping",
            "container engine of pod p ended with exit code 137 (OOMKilled): RuntimeError: Not enough memory",
        ),
    ),
    "failed without a log": (
        pod(containerStatuses=[waiting("CrashLoopBackOff", lastState={"terminated": {"exitCode": 2}})]),
        "speculative",
        Problem("CrashLooping", "container engine of pod p ended with exit code 2"),
    ),
    "killed without a log message": (
        pod(
            containerStatuses=[
                waiting(
                    "CrashLoopBackOff", lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
                )
            ]
        ),
        "speculative",
        Problem("CrashLooping", "container engine of pod p ended with exit code 137 (OOMKilled)"),
    ),
    "download of the model failed": (
        pod(
            initContainerStatuses=[waiting("CrashLoopBackOff", name="model-source", lastState=NO_FILES)],
            containerStatuses=[waiting("PodInitializing")],
        ),
        "speculative",
        Problem(
            "CrashLooping",
            "container model-source of pod p ended with exit code 1: s3://m/q contains no file of the model",
        ),
    ),
    "waiting for the engine with which it shares a GPU": (
        pod(
            initContainerStatuses=[RUNNING | {"name": "wait-for-neighbour"}],
            containerStatuses=[waiting("PodInitializing")],
        ),
        "speculative",
        Problem(
            "Starting",
            "pod p starts its engine when that of the greedy pool is ready, because both share a GPU",
        ),
    ),
    "loading": (
        pod(containerStatuses=[RUNNING]),
        "speculative",
        Problem("LoadingModel", "pod p is loading its model"),
    ),
    "starting gateway": (
        pod(component="gateway", containerStatuses=[RUNNING]),
        "gateway",
        Problem("Starting", "pod p is starting"),
    ),
    "no container status": (pod(), "speculative", Problem("Starting", "pod p is starting")),
    "ready": (pod(conditions=[READY], containerStatuses=[RUNNING | {"ready": True}]), "speculative", None),
    "ready again after a crash": (
        pod(conditions=[READY], containerStatuses=[RUNNING | {"ready": True, "lastState": ENDED}]),
        "speculative",
        None,
    ),
    "terminating": (
        pod() | {"metadata": {"name": "p", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
        "speculative",
        None,
    ),
}


@pytest.mark.parametrize(("body", "component", "wanted"), CASES.values(), ids=CASES.keys())
def test_pod_is_diagnosed(body: Manifest, component: str, wanted: Problem | None) -> None:
    assert problem(body, component) == wanted


def test_most_severe_problem_is_reported() -> None:
    loading, crash = Problem("LoadingModel", "a"), Problem("CrashLooping", "z")
    assert most_severe([loading, crash]) == crash
    assert most_severe([]) is None
