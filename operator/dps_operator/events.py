"""Kubernetes Events: one for each change that a person would want to hear of. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from dps_operator.kinds import ROUTER
from dps_operator.resources import MANAGED_BY, Manifest, digest

REPORTED_TYPES = ("Ready", "SpecValid", "Progressing")
TRANSITIONAL_REASONS = ("NotCreated", "Starting", "LoadingModel")
"""Reasons of not being ready that every deployment passes through: no cause for a warning."""


def _reason(condition: Mapping[str, Any]) -> tuple[Any, Any]:
    return condition.get("status"), condition.get("reason")


def events(
    metadata: Manifest, before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], now: str
) -> list[Manifest]:
    """Events for conditions that changed. Their names follow from what they say and when the status moved.

    So neither an operator that is killed half-way nor a second one posts any twice.
    """
    known = {one["type"]: one for one in before}
    made = []
    for condition in after:
        old = known.get(condition["type"], {})
        if condition["type"] not in REPORTED_TYPES or _reason(old) == _reason(condition):
            continue
        said = {key: condition[key] for key in ("type", "status", "reason", "observedGeneration")}
        identity = digest([metadata["uid"], said, condition["lastTransitionTime"]])
        failed = condition["type"] != "Progressing" and condition["status"] == "False"
        bad = failed and condition["reason"] not in TRANSITIONAL_REASONS
        made.append(
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
    return made
