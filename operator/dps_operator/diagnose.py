"""What pods tell: why one is not ready, the result of a calibration, the health of a prefix cache. No I/O."""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import ValidationError

from dps_engines.pools import POOLS, PoolName
from dps_operator.api import RecommendedRouting
from dps_operator.objects import NEIGHBOUR_CONTAINER, Manifest, condition

PULL_FAILURES = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
CONFIG_FAILURES = {"CreateContainerConfigError"}
RUNTIME_FAILURES = {"CreateContainerError", "RunContainerError"}
"""Reasons for which a container waits after the container runtime has failed to start it."""
RUNTIME_ENDS = {"StartError", "ContainerCannotRun"}
"""Reasons with which such a container has ended, while the kubelet waits before it tries again."""
SEVERITY = (
    "CrashLooping",
    "ImagePullFailed",
    "ConfigMissing",
    "ContainerNotStarted",
    "WaitingForGPU",
    "WaitingForVolume",
    "Unschedulable",
    "LoadingModel",
    "Starting",
)


@dataclass(frozen=True)
class Problem:
    """Why a pod is not ready: a CamelCase reason, and a message that says what to do."""

    reason: str
    message: str


def most_severe(problems: list[Problem]) -> Problem | None:
    """The most severe problem, or None; ties are broken by message."""
    ranked = sorted(problems, key=lambda problem: (SEVERITY.index(problem.reason), problem.message))
    return ranked[0] if ranked else None


def last_line(text: str) -> str:
    """The last non-empty line of a log, limited to its last 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""


def _unscheduled(pod: Manifest, engine: bool) -> Problem | None:
    name = pod["metadata"]["name"]
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return None
    # The scheduler appends the result of preemption after the first sentence.
    explanation = scheduled.get("message", "it has not been scheduled").split(". ", 1)[0].rstrip(".")
    if re.search("persistent ?volume", explanation, re.IGNORECASE):
        advice = "check the storage class and its provisioner"
        return Problem("WaitingForVolume", f"pod {name} is waiting for its volume: {explanation}; {advice}")
    if engine:
        advice = "add a node that spec.nodePool selects and that has a free GPU, or change spec.nodePool"
        return Problem("WaitingForGPU", f"pod {name} is waiting for a node: {explanation}; {advice}")
    return Problem("Unschedulable", f"pod {name} is waiting for a node: {explanation}")


def _not_started(name: str, container: str, explanation: str) -> Problem:
    message = f"container {container} of pod {name} cannot be started: {explanation}"
    return Problem("ContainerNotStarted", message)


def _crash(name: str, container: str, terminated: dict[str, Any]) -> Problem:
    reason, why = terminated.get("reason", "Error"), last_line(terminated.get("message", ""))
    if reason in RUNTIME_ENDS:
        return _not_started(name, container, why or reason)
    end = f"container {container} of pod {name} ended with exit code {terminated.get('exitCode')}"
    # "Error" says no more than the exit code. Another reason, such as OOMKilled, cannot be found in the log.
    end += f" ({reason})" if reason != "Error" else ""
    return Problem("CrashLooping", f"{end}: {why}" if why else end)


def _container(name: str, status: dict[str, Any]) -> Problem | None:
    state, last = status.get("state", {}), status.get("lastState", {})
    waiting = state.get("waiting", {})
    reason, explanation = waiting.get("reason", ""), waiting.get("message", "")
    if reason in PULL_FAILURES:
        advice = "check the image's name and the pull secret"
        return Problem("ImagePullFailed", f"pod {name} cannot pull {status['image']}; {advice}")
    if reason in CONFIG_FAILURES:
        return Problem("ConfigMissing", f"pod {name} cannot start: {explanation or reason}")
    if reason in RUNTIME_FAILURES:
        return _not_started(name, status["name"], last_line(explanation) or reason)
    for ended in (state.get("terminated"), last.get("terminated")):
        if ended and (ended.get("exitCode") or reason == "CrashLoopBackOff") and not status.get("ready"):
            return _crash(name, status["name"], ended)
    return None


def awaiting_volumes(pod: Manifest) -> bool:
    """Whether the kubelet may still be preparing the pod's volumes, which it does before it creates a container.

    False for a pod without a node. The kubelet reports its end in the condition
    PodReadyToStartContainers; older versions do so only after they have pulled the images.
    """
    status = pod.get("status", {})
    unscheduled = condition(pod, "PodScheduled").get("status") == "False"
    if unscheduled or condition(pod, "PodReadyToStartContainers").get("status") == "True":
        return False
    if pod["metadata"].get("deletionTimestamp"):
        return False
    failures = PULL_FAILURES | CONFIG_FAILURES | RUNTIME_FAILURES
    containers = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
    states = [container.get("state", {}) for container in containers]
    # Whether the kubelet has tried to start a container.
    begun = any("running" in state or "terminated" in state for state in states)
    return not begun and all(state.get("waiting", {}).get("reason") not in failures for state in states)


def unmounted(name: str, message: str) -> Problem:
    """Why a pod's volumes cannot be mounted, from the message of the kubelet's event."""
    explanation = message.rpartition(" : ")[2].strip()
    if re.search("(secret|configmap) .*not found|non-existent", explanation, re.IGNORECASE):
        return Problem("ConfigMissing", f"pod {name} cannot start: {explanation}")
    return Problem("WaitingForVolume", f"pod {name} is waiting for its volume: {last_line(message)}")


def problem(pod: Manifest, component: str) -> Problem | None:
    """Why a pod is not ready; None if it is ready or terminating."""
    if pod["metadata"].get("deletionTimestamp"):
        return None
    name, status = pod["metadata"]["name"], pod.get("status", {})
    unscheduled = _unscheduled(pod, component in POOLS)
    if unscheduled:
        return unscheduled
    containers = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
    for container in containers:
        found = _container(name, container)
        if found:
            return found
    if is_ready(pod):
        return None
    running = [container["name"] for container in containers if "running" in container.get("state", {})]
    if NEIGHBOUR_CONTAINER in running:
        message = (
            f"pod {name} starts its engine when that of the greedy pool is ready, because both share a GPU"
        )
        return Problem("Starting", message)
    if component in POOLS and running:
        return Problem("LoadingModel", f"pod {name} is loading its model")
    return Problem("Starting", f"pod {name} is starting")


def is_ready(pod: Manifest) -> bool:
    """Whether the pod's Ready condition is True."""
    return bool(condition(pod, "Ready").get("status") == "True")


SHOWN_CHARACTERS: Final = 80
"""The maximum length of an unreadable result in a message; the rest is cut off."""


@dataclass(frozen=True)
class Calibrated:
    """The end of a calibration."""

    time: str
    """When it ended (RFC 3339, UTC), or began if no container has run."""
    found: RecommendedRouting | None = None
    """Its result; None if it has failed."""
    failure: str = ""
    """Why it has no result; empty if it has one."""


def calibrated(pod: Manifest) -> Calibrated | None:
    """The end of the calibration that the pod has run; None if it has not ended.

    Its termination message is the result, or after a failure the end of the log or why the kubelet ended the pod.
    """
    status = pod.get("status", {})
    states = [container.get("state", {}) for container in status.get("containerStatuses", [])]
    ended = next((state["terminated"] for state in states if state.get("terminated") is not None), None)
    if ended is None:
        return None
    message = status.get("message") or ended.get("message", "")
    time = ended.get("finishedAt") or pod["metadata"].get("creationTimestamp", "")
    if ended["exitCode"] != 0:
        return Calibrated(time, failure=f"the last calibration failed: {last_line(message)}")
    try:
        return Calibrated(time, _result(message, time))
    except ValueError as error:
        failure = (
            f"the result of the last calibration cannot be read: {error}; check that labImage in the chart's "
            "values has the version of the operator"
        )
        return Calibrated(time, failure=failure)


def _result(message: str, time: str) -> RecommendedRouting:
    """The result in a termination message. Raises ValueError, whose message says what is wrong with it."""
    shown = message if len(message) <= SHOWN_CHARACTERS else f"{message[:SHOWN_CHARACTERS]}…"
    quoted = json.dumps(shown, ensure_ascii=False)
    try:
        document = json.loads(message)
    except ValueError:
        raise ValueError(f"its termination message {quoted} is not JSON") from None
    if not isinstance(document, dict):
        raise ValueError(f"its termination message {quoted} is not a JSON object")
    try:
        return RecommendedRouting.model_validate({**document, "time": time})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{field} in its termination message: {first['msg']}") from None


@dataclass
class CacheHealth:
    """Whether the pools share pages and fetch them, and what is wrong according to gateways and engines."""

    unreachable: str = ""
    """Why it is unknown whether the pools fetch; empty if the gateways answer."""
    judged: set[PoolName] = field(default_factory=set)
    """Pools that had enough tokens to fetch."""
    unserved: set[PoolName] = field(default_factory=set)
    """Those of them that fetched too few."""
    reporting: set[PoolName] = field(default_factory=set)
    """Pools of which an engine has reported the pages that it shares, or why it shares none."""
    unshared: dict[PoolName, str] = field(default_factory=dict)
    """Why an engine of these pools shares no pages."""
    different: bool = False
    """Whether the pools share no pages with each other, although each shares some."""
    full: set[PoolName] = field(default_factory=set)
    """Pools for most of whose pages the storage had no space."""
    failing: set[PoolName] = field(default_factory=set)
    """Pools most of whose pages could not be written or read."""
    slow: dict[PoolName, str] = field(default_factory=dict)
    """Pools that fetch more slowly than they compute, with the bandwidth when this was found."""
