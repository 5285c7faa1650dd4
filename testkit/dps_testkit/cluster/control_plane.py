"""A control plane for tests: API server, controllers and scheduler, with kwok in place of nodes."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dps_testkit.cluster.kube import BIN, CONTEXT, Kube, refuse_unknown, volume
from dps_testkit.paths import CLUSTER_SCRIPTS

VOLUMES = 120


@contextmanager
def control_plane(state: Path, port: int) -> Iterator[Kube]:
    """Run a control plane, with A100 nodes simulated by kwok, on five ports starting at `port`."""
    subprocess.run([CLUSTER_SCRIPTS / "build", "control-plane"], check=True)
    environment = {**os.environ, "NODE": "0", "PORT": str(port), "CLUSTER_BIN": str(BIN)}
    try:
        subprocess.run([CLUSTER_SCRIPTS / "up", state], check=True, env=environment)
        kube = Kube(state / "kubeconfig")
        refuse_unknown(kube, CONTEXT)
        kube.kubectl("apply", "--server-side", "--filename", str(CLUSTER_SCRIPTS / "world.yaml"))
        kube.apply(*(volume(number, Path("/nonexistent")) for number in range(VOLUMES)))
        yield kube
    finally:
        subprocess.run([CLUSTER_SCRIPTS / "down", state], check=True)
