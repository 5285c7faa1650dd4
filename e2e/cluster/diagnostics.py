"""What a failed test leaves behind: pods, events, logs, and the states of objects."""

from pathlib import Path

from dps_testkit.cluster.kube import Kube
from dps_testkit.errors import RefusedError

KINDS = "dpsrouters,deployments,statefulsets,pods,services,endpointslices,persistentvolumeclaims"
SHOWN_LINES = 25
"""Of each log in the short version; the folder has all of it."""


def _told(kube: Kube, *arguments: str) -> str:
    try:
        return kube.kubectl(*arguments)
    except RefusedError as error:
        return f"{error}\n"


def collect(kube: Kube, folder: Path) -> str:
    """Everything about a namespace into files of `folder`; the short version of it."""
    folder.mkdir(parents=True, exist_ok=True)
    objects = _told(kube, "get", KINDS, "--output", "wide")
    events = _told(kube, "get", "events", "--sort-by", ".lastTimestamp")
    (folder / "objects.txt").write_text(objects)
    (folder / "objects.yaml").write_text(_told(kube, "get", KINDS, "--output", "yaml"))
    (folder / "events.txt").write_text(events)
    (folder / "pods.txt").write_text(_told(kube, "describe", "pods"))
    short = [objects, *events.splitlines(keepends=True)[-SHOWN_LINES:]]
    for pod in _told(kube, "get", "pods", "--output", "name").splitlines():
        if not pod.startswith("pod/"):
            continue  # kubectl's complaint
        for when in ((), ("--previous",)):
            log = _told(kube, "logs", pod, "--all-containers", "--prefix", *when)
            if when and "not found" in log:
                continue
            name = "-".join((pod.removeprefix("pod/"), *(flag.strip("-") for flag in when)))
            (folder / f"{name}.log").write_text(log)
            short += [f"--- {name}\n", *log.splitlines(keepends=True)[-SHOWN_LINES:]]
    return "".join(short)
