"""Kubernetes Events for changed conditions. This module performs no I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

from dps_operator.kinds import ROUTER
from dps_operator.resources import MANAGED_BY, Manifest, digest

REPORTED_TYPES = ("Ready", "SpecValid", "Progressing", "AutoscalingActive", "RouteAccepted", "Monitored")
EXPECTED_REASONS = ("NotCreated", "Starting", "LoadingModel", "ScaledToZero", "Suspended")
"""Condition reasons that are normal while a DPSRouter starts or is stopped; their events have type Normal."""


def events(
    metadata: Manifest, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], now: str
) -> list[Manifest]:
    """Events for conditions that changed. now: the time in RFC 3339."""
    previous = {condition["type"]: condition for condition in before}
    return [
        _event(metadata, condition, now)
        for condition in after
        if condition["type"] in REPORTED_TYPES
        and _reason(previous.get(condition["type"], {})) != _reason(condition)
    ]


def _reason(condition: Mapping[str, Any]) -> tuple[Any, Any]:
    return condition.get("status"), condition.get("reason")


def _event(metadata: Manifest, condition: Mapping[str, Any], now: str) -> Manifest:
    """The Event for a condition.

    Its name is derived from its content and the transition time, so that neither a restarted operator nor a second
    one creates it twice.
    """
    content = {key: condition[key] for key in ("type", "status", "reason", "observedGeneration")}
    identity = digest([metadata["uid"], content, condition["lastTransitionTime"]])
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{identity}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": ROUTER.api_version,
            "kind": ROUTER.name,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "reason": condition["reason"],
        "message": condition["message"][:1024],
        "type": "Warning" if _is_problem(condition) else "Normal",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
        "source": {"component": MANAGED_BY},
        "reportingComponent": MANAGED_BY,
        "reportingInstance": MANAGED_BY,
    }


def _is_problem(condition: Mapping[str, Any]) -> bool:
    """Whether a condition has a value that is not expected while a DPSRouter is created, changed or stopped."""
    if condition["type"] == "Progressing":
        return bool(condition["reason"] == "ProgressDeadlineExceeded")
    return condition["status"] == "False" and condition["reason"] not in EXPECTED_REASONS
