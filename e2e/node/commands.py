"""Runs commands of the documentation against a cluster."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from dps_testkit.cluster.kube import BIN, Kube
from dps_testkit.documents import run_by
from dps_testkit.paths import ROOT

PRELUDE = """\
set -euo pipefail
trap 'jobs -p | xargs --no-run-if-empty kill' EXIT
kubectl config set-context --current --namespace "$NAMESPACE" >/dev/null
"""
"""Ends background processes with the script, and selects the namespace."""


def run_documented(test: Path, kube: Kube, seconds: float) -> str:
    """Run, as one script, the commands that the documents mark as run by `test`; returns what they print.

    seconds: time limit of the script. Fails if a command fails.
    """
    script = PRELUDE + "".join(block.text for block in run_by(test))
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "KUBECONFIG": shutil.copy(kube.kubeconfig, folder),
            "NAMESPACE": kube.namespace,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        }
        done = subprocess.run(
            ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
