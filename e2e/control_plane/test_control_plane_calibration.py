"""A calibration's Job, started from the CronJob on a real API server; the test writes the result of its pod."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from dps_testkit.cluster.kube import Kube
from dps_testkit.waiting import eventually
from e2e.control_plane.objects import pods, ready

pytest_plugins = ["e2e.cluster.fixtures"]

FOUND = {
    "policy": "TotalLength",
    "thresholdTokens": 900,
    "objective": "session",
    "seconds": 1.25,
    "verdict": "Two pools are the right answer.",
}


def end(kube: Kube, pod: str, result: dict[str, Any]) -> None:
    """End a calibration's pod with a result, as the kubelet does."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    terminated = {"exitCode": 0, "reason": "Completed", "finishedAt": now, "message": json.dumps(result)}
    container = {
        "name": "calibration",
        "image": "lab",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": terminated},
    }
    status = {"phase": "Succeeded", "containerStatuses": [container]}
    kube.patch("pod", pod, {"status": status}, "--subresource", "status")


def used(kube: Kube) -> tuple[str, int]:
    """The policy and the threshold in the configuration of the gateways, which equal those in the status."""
    routing = yaml.safe_load(kube.get("configmap", "qwen-gateway")["data"]["config.yaml"])["routing"]
    status = kube.get("dpsrouter", "qwen")["status"]["routing"]
    found = routing["policy"], routing["thresholdTokens"]
    assert found == (status["policy"], status["thresholdTokens"])
    return found


@pytest.mark.usefixtures("operator")
def test_a_recommendation_changes_the_routing_only_while_it_is_to_be_applied(kube: Kube) -> None:
    ready(kube, routing={"calibration": {}})
    kube.until("qwen", RoutingCalibrated="NotCalibrated")
    kube.kubectl("create", "job", "--from=cronjob/qwen-calibration", "now")

    def running() -> None:
        assert [pod["status"]["phase"] for pod in pods(kube, "calibration").values()] == ["Running"]

    eventually(running)
    (name,) = pods(kube, "calibration")
    end(kube, name, FOUND)
    kube.kubectl("wait", "job/now", "--for=condition=Complete", "--timeout=60s")
    kube.until("qwen", RoutingCalibrated="Recommended")
    recommended = kube.get("dpsrouter", "qwen")["status"]["routing"]["recommended"]
    assert {key: recommended[key] for key in FOUND} == FOUND
    assert used(kube) == ("DeltaPrefill", 128)
    for apply, reason, expected in (
        (True, "Applied", ("TotalLength", 900)),
        (False, "Recommended", ("DeltaPrefill", 128)),
    ):
        kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"calibration": {"apply": apply}}}})
        kube.until("qwen", RoutingCalibrated=reason)

        def check(expected: tuple[str, int] = expected) -> None:
            assert used(kube) == expected

        eventually(check)
