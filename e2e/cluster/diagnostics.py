"""Collects the objects, events and logs of a namespace after a failed test."""

from pathlib import Path

from dps_testkit.cluster.kube import Kube
from dps_testkit.errors import RefusedError

KINDS = "dpsrouters,deployments,statefulsets,pods,services,endpointslices,persistentvolumeclaims"
SHOWN_LINES = 25
"""Lines of each log in the summary; the files have all lines."""


def _output(kube: Kube, *arguments: str) -> str:
    try:
        return kube.kubectl(*arguments)
    except RefusedError as error:
        return f"{error}\n"


def collect(kube: Kube, folder: Path) -> str:
    """Write the objects, events and logs of a namespace to `folder`; returns a summary."""
    folder.mkdir(parents=True, exist_ok=True)
    objects = _output(kube, "get", KINDS, "--output", "wide")
    events = _output(kube, "get", "events", "--sort-by", ".lastTimestamp")
    (folder / "objects.txt").write_text(objects)
    (folder / "objects.yaml").write_text(_output(kube, "get", KINDS, "--output", "yaml"))
    (folder / "events.txt").write_text(events)
    (folder / "pods.txt").write_text(_output(kube, "describe", "pods"))
    short = [objects, *events.splitlines(keepends=True)[-SHOWN_LINES:]]
    for pod in _output(kube, "get", "pods", "--output", "name").splitlines():
        if not pod.startswith("pod/"):
            continue  # the command failed, and this line is part of its error message
        for when in ((), ("--previous",)):
            log = _output(kube, "logs", pod, "--all-containers", "--prefix", *when)
            if when and "not found" in log:
                continue
            name = "-".join((pod.removeprefix("pod/"), *(flag.strip("-") for flag in when)))
            (folder / f"{name}.log").write_text(log)
            short += [f"--- {name}\n", *log.splitlines(keepends=True)[-SHOWN_LINES:]]
    return "".join(short)
