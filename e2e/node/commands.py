"""Runs commands of the documentation against a cluster."""

import os
import shutil
import subprocess
import sys
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


def run_documented(test: Path, kube: Kube, seconds: float, folder: Path = ROOT) -> str:
    """Run, as one script, the commands that the documents mark as run by `test`; returns what they print.

    seconds: time limit of the script. folder: where it runs. Fails if a command fails.
    """
    return run_script("".join(block.text for block in run_by(test)), kube, seconds, folder)


def run_script(script: str, kube: Kube, seconds: float, folder: Path = ROOT) -> str:
    """Like `run_documented`, for the given commands."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {
            **os.environ,
            "KUBECONFIG": shutil.copy(kube.kubeconfig, scratch),
            "NAMESPACE": kube.namespace,
            "PATH": os.pathsep.join([str(BIN), str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        done = subprocess.run(
            ["bash", "-c", PRELUDE + script],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
