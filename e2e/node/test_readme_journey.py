"""The documented installation on Kubernetes, word for word, from `helm install` to an answer."""

import json
import re
from pathlib import Path

import pytest

from dps_testkit.cluster.providers import Cluster
from e2e.node.commands import run_documented
from e2e.node.conftest import uninstall

SECONDS = 420.0


@pytest.mark.timeout(900)
def test_readme_commands_lead_to_an_answer(node: Cluster) -> None:
    uninstall(node)
    try:
        printed = run_documented(Path(__file__), node.kube, SECONDS)
        assert re.search(r"^emulated +True +DeltaPrefill +128 +1 +1 +2 ", printed, flags=re.MULTILINE)
        head, _, body = printed.partition("HTTP/1.1 200 OK\n")[2].partition("\n\n")
        headers = dict(re.findall(r"^(x-dps-[a-z-]+): (.*)$", head, flags=re.MULTILINE))
        answer, _ = json.JSONDecoder().raw_decode(body)
        assert headers["x-dps-reason"] == "within_threshold"
        assert int(headers["x-dps-prompt-tokens"]) == answer["usage"]["prompt_tokens"]
    finally:
        node.kube.kubectl("delete", "dpsrouters", "--all", "--ignore-not-found")
        uninstall(node)
