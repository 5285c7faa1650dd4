"""A calibration on a real node: it reads the gateways' decision logs, and its recommendation is applied on request.

The router has a GPU budget, so that the recommendation contains a rule for it.
"""

from pathlib import Path

import yaml

from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.providers import Cluster
from dps_testkit.waiting import eventually
from e2e.node.commands import run_documented
from e2e.node.conftest import READY_SECONDS, emulated
from e2e.node.sessions import alternating, turns

CALIBRATION_SECONDS = 300.0
SESSIONS = 12


def configured_policy(kube: Kube) -> str:
    """The policy in the configuration of the gateways."""
    config = yaml.safe_load(kube.get("configmap", "qwen-gateway")["data"]["config.yaml"])
    policy: str = config["routing"]["policy"]
    return policy


def test_the_documented_commands_calibrate_and_the_gateways_apply_the_result_on_request(
    node: Cluster, kube: Kube
) -> None:
    router = emulated("qwen")
    router["spec"]["routing"] = {"policy": "Random", "calibration": {}}
    router["spec"]["gpuBudget"] = {"gpus": 3, "cooldownSeconds": 10}
    kube.apply(router)
    kube.until("qwen", READY_SECONDS, Ready="True", Progressing="Settled", RoutingCalibrated="NotCalibrated")
    with node.reach(kube, "qwen-gateway", 8000) as url:
        for number in range(SESSIONS):
            system = f"You are assistant {number}."
            assert len(list(turns(url, "emulated", alternating(3), answer_tokens=20, system=system))) == 3

    run_documented(Path(__file__), kube, CALIBRATION_SECONDS)
    kube.until("qwen", READY_SECONDS, RoutingCalibrated="Recommended")
    status = kube.get("dpsrouter", "qwen")["status"]
    assert (configured_policy(kube), status["routing"]["policy"]) == ("Random", "Random")
    assert status["routing"]["recommended"]["policy"] != "Random"
    assert status["gpuBudget"]["rule"] != "Calibrated"
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"calibration": {"apply": True}}}})

    def applied() -> None:
        """The gateways are configured with the recommended policy, which is never Random."""
        routing = kube.get("dpsrouter", "qwen")["status"]["routing"]
        assert configured_policy(kube) == routing["policy"] == routing["recommended"]["policy"] != "Random"
        found = routing["recommended"]["gpuBudget"]
        assert found["speculativeReplicas"] + found["greedyReplicas"] == 3
        assert kube.get("dpsrouter", "qwen")["status"]["gpuBudget"]["rule"] == "Calibrated"

    eventually(applied, READY_SECONDS)
    kube.until("qwen", READY_SECONDS, RoutingCalibrated="Applied")
    kube.kubectl("delete", "dpsrouter", "qwen")
