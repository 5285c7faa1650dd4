"""Pods with engines that are installed on this machine: their image has Debian and Python, the rest is mounted."""

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from dps_testkit.cluster.kube import Manifest
from dps_testkit.cluster.providers import Cluster

IMAGE = "localhost/python:bookworm"
GLIBC = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libresolv.so.2", "librt.so.1"}
LOAD_SECONDS = 900.0
"""Time limit for loading two engines on a busy machine; an idle one with two cores needs 90 s."""


def load_image(node: Cluster, folder: Path) -> None:
    """Load the image into the node, with an archive in `folder`."""
    archive = folder / "python.tar"
    target = f"docker-archive:{archive}:{IMAGE}"
    subprocess.run(["buildah", "push", "--quiet", IMAGE, target], check=True, timeout=300)
    subprocess.run([*node.load, archive], check=True, timeout=300)


def copy_libraries(users: Iterable[Path], folder: Path) -> None:
    """Copy the system's libraries that these programs and libraries load. The image has those of glibc."""
    for user in users:
        done = subprocess.run(["ldd", user], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
        for name, path in re.findall(r"^\s*(\S+) => (/(?:usr/)?lib/\S+)", done.stdout, re.MULTILINE):
            if name not in GLIBC:
                shutil.copy(path, folder / name)


def mounted(container: str, **folders: Path) -> Manifest:
    """A pod template that mounts folders of this machine at /opt/NAME."""
    mounts = [{"name": name, "mountPath": f"/opt/{name}"} for name in folders]
    volumes = [{"name": name, "hostPath": {"path": str(path)}} for name, path in folders.items()]
    return {"spec": {"containers": [{"name": container, "volumeMounts": mounts}], "volumes": volumes}}
