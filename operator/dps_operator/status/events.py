"""Kubernetes Events for changed conditions. This module performs no I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

from dps_operator.kinds import ROUTER
from dps_operator.resources import MANAGED_BY, Manifest, digest

REPORTED_TYPES = ("Ready", "SpecValid", "Progressing", "AutoscalingActive", "Monitored")
EXPECTED_REASONS = ("NotCreated", "Starting", "LoadingModel", "ScaledToZero", "Suspended")
"""Condition reasons that are normal while a DPSRouter starts or is stopped; their events have type Normal."""


def _reason(condition: Mapping[str, Any]) -> tuple[Any, Any]:
    return condition.get("status"), condition.get("reason")


def events(
    metadata: Manifest, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], now: str
) -> list[Manifest]:
    """Events for conditions that changed.

    An event's name is derived from its content and the transition time, so that neither a restarted operator nor
    a second one creates it twice.
    """
    previous = {condition["type"]: condition for condition in before}
    manifests = []
    for condition in after:
        old = previous.get(condition["type"], {})
        if condition["type"] not in REPORTED_TYPES or _reason(old) == _reason(condition):
            continue
        content = {key: condition[key] for key in ("type", "status", "reason", "observedGeneration")}
        identity = digest([metadata["uid"], content, condition["lastTransitionTime"]])
        failed = condition["type"] != "Progressing" and condition["status"] == "False"
        bad = condition["reason"] == "ProgressDeadlineExceeded" or (
            failed and condition["reason"] not in EXPECTED_REASONS
        )
        manifests.append(
            {
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
                "type": "Warning" if bad else "Normal",
                "firstTimestamp": now,
                "lastTimestamp": now,
                "count": 1,
                "source": {"component": MANAGED_BY},
                "reportingComponent": MANAGED_BY,
                "reportingInstance": MANAGED_BY,
            }
        )
    return manifests
