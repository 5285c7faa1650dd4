"""The documented installation on Kubernetes, word for word, from `helm install` to an answer."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from dps_testkit.cluster.kube import BIN, Kube
from dps_testkit.cluster.providers import Cluster
from dps_testkit.documents import run_by
from dps_testkit.paths import ROOT
from e2e.node.conftest import RELEASE, SYSTEM

SECONDS = 420.0


def script() -> str:
    """The commands that the documents mark as run by this file, and a trap that kills background processes."""
    commands = "".join(block.text for block in run_by(Path(__file__)))
    return f"set -euo pipefail; trap 'kill $(jobs -p)' EXIT\n{commands}"


@pytest.mark.timeout(900)
def test_readme_commands_lead_to_an_answer(node: Cluster) -> None:
    environment = {
        **os.environ,
        "KUBECONFIG": str(node.kube.kubeconfig),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    try:
        done = subprocess.run(
            ["bash", "-c", script()],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"^emulated +True +DeltaPrefill +128 +1 +1 +2 ", done.stdout, flags=re.MULTILINE)
        head, _, body = done.stdout.partition("HTTP/1.1 200 OK\n")[2].partition("\n\n")
        headers = dict(re.findall(r"^(x-dps-[a-z-]+): (.*)$", head, flags=re.MULTILINE))
        answer, _ = json.JSONDecoder().raw_decode(body)
        assert headers["x-dps-reason"] == "within_threshold"
        assert int(headers["x-dps-prompt-tokens"]) == answer["usage"]["prompt_tokens"]
    finally:
        node.kube.kubectl("delete", "dpsrouters", "--all", "--ignore-not-found")
        Kube(node.kube.kubeconfig, SYSTEM).helm("uninstall", RELEASE, "--wait", "--ignore-not-found")
        node.kube.kubectl("delete", "crd", "dpsrouters.dpsrouter.io", "--ignore-not-found")
