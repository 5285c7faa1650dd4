"""Calibrations: the CronJob, how its result reaches the status, and when the gateways use it."""

import json
from typing import Any

import pytest

from dps_operator.build.calibration import calibration_cron_job
from dps_operator.effective import Router
from dps_operator.errors import SpecError
from dps_testkit.operator.routers import PREFIX_CACHE, SETTINGS, SMALLEST, router
from tests.operator.harness import KEY, OperatorHarness
from tests.operator.objects import pod

FOUND = {
    "policy": "TotalLength",
    "thresholdTokens": 900,
    "objective": "session",
    "seconds": 1.25,
    "verdict": "Two pools are the right answer.",
}


def calibrated(calibration: dict[str, Any], **spec: Any) -> Router:
    return router({**SMALLEST, **spec, "routing": {"calibration": calibration}})


def arguments(of: Router) -> dict[str, str]:
    """The options of the CronJob's container."""
    (job,) = calibration_cron_job(of, SETTINGS)
    (container,) = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    command, *options = container["args"]
    assert command == "calibrate"
    pairs = [option for each in options for option in ((each, "") if each == "--one-gpu" else (each,))]
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param({"prefixCache": PREFIX_CACHE["prefixCache"]}, {"--cache": "common"}, id="common cache"),
        pytest.param({"gateway": {"replicas": 5}}, {"--replicas": "5"}, id="gateways"),
        pytest.param(
            {
                "pools": {
                    "speculative": {
                        "speculation": {"algorithm": "Ngram"},
                        "autoscaling": {"minReplicas": 3, "maxReplicas": 4, "targetInFlightPerReplica": 4},
                    },
                    "greedy": {"replicas": 2},
                }
            },
            {"--algorithm": "NGRAM", "--fleet": "speculative=3,greedy=2"},
            id="pools",
        ),
        pytest.param(
            {"engine": {"version": "0.5.23", "tensorParallel": 2}, "gpuBudget": {"gpus": 9}},
            {"--budget": "4", "--cooldown": "600"},
            id="budget",
        ),
    ],
)
def test_the_simulated_fleet_is_that_of_the_spec(spec: dict[str, Any], expected: dict[str, str]) -> None:
    found = arguments(calibrated({}, **{"engine": {"version": "0.5.23"}, **spec}))
    assert {name: found[name] for name in expected} == expected
    assert ("--fleet" in found) != ("--budget" in found)


def test_suspended_engines_are_not_calibrated() -> None:
    (job,) = calibration_cron_job(calibrated({}, suspend=True), SETTINGS)
    assert job["spec"]["suspend"] is True


def test_a_name_that_is_too_long_for_a_cron_job_is_an_error() -> None:
    spec = {**SMALLEST, "routing": {"calibration": {}}}
    assert calibration_cron_job(router(spec, "r" * 40), SETTINGS)
    with pytest.raises(SpecError, match="at most 40 characters"):
        calibration_cron_job(router(spec, "r" * 41), SETTINGS)


class CalibrationHarness(OperatorHarness):
    """An operator with one DPSRouter, and pods of calibrations."""

    def __init__(self, calibration: dict[str, Any]) -> None:
        super().__init__({**SMALLEST, "routing": {"calibration": calibration}})

    def end(self, name: str, exit_code: int, message: str, time: str) -> None:
        """End the pod of a calibration."""
        terminated = {"exitCode": exit_code, "message": message, "finishedAt": time}
        status = {"name": "calibration", "ready": False, "state": {"terminated": terminated}}
        self.cluster.objects["Pod", KEY[0], name] = pod(name, "calibration", containerStatuses=[status])

    async def settle(self) -> dict[str, Any]:
        """Reconcile twice, as after the change of the status; returns status.routing and the condition."""
        for _ in range(2):
            await self.reconcile()
        conditions = [each for each in self.status()["conditions"] if each["type"] == "RoutingCalibrated"]
        return {
            "routing": self.status()["routing"],
            "condition": [(each["status"], each["reason"], each["message"]) for each in conditions],
        }

    def policy(self) -> tuple[str, int]:
        """The policy and the threshold in the gateways' configuration."""
        return self.routing()["policy"], self.routing()["thresholdTokens"]


async def calibrated_harness(calibration: dict[str, Any]) -> CalibrationHarness:
    """A DPSRouter that has been calibrated once."""
    harness = CalibrationHarness(calibration)
    harness.end("one", 0, json.dumps(FOUND), "2026-01-01T03:00:10Z")
    await harness.settle()
    return harness


@pytest.mark.parametrize(
    ("apply", "reason", "used"),
    [(False, "Recommended", ("DeltaPrefill", 128)), (True, "Applied", ("TotalLength", 900))],
)
async def test_the_result_is_reported_and_applied_only_on_request(
    apply: bool, reason: str, used: tuple[str, int]
) -> None:
    harness = CalibrationHarness({"apply": apply})
    harness.end("one", 0, json.dumps(FOUND), "2026-01-01T03:00:10Z")
    found = await harness.settle()
    assert found["condition"] == [("True", reason, FOUND["verdict"])]
    policy, threshold = used
    assert found["routing"] == {
        "policy": policy,
        "thresholdTokens": threshold,
        "recommended": {**FOUND, "time": "2026-01-01T03:00:10Z"},
    }
    assert harness.policy() == used


async def test_a_policy_without_a_threshold_keeps_the_one_of_the_spec() -> None:
    harness = CalibrationHarness({"apply": True})
    found = {name: value for name, value in FOUND.items() if name != "thresholdTokens"}
    harness.end("one", 0, json.dumps({**found, "policy": "Adaptive"}), "2026-01-01T03:00:10Z")
    await harness.settle()
    assert harness.policy() == ("Adaptive", 128)


async def test_the_recommendation_remains_after_its_pod_and_after_a_failure() -> None:
    harness = await calibrated_harness({"apply": True})
    del harness.cluster.objects["Pod", KEY[0], "one"]
    harness.end("two", 2, "reading …\ndps calibrate: use a longer log\n", "2026-01-02T03:00:10Z")
    found = await harness.settle()
    assert found["condition"] == [
        ("False", "CalibrationFailed", "the last calibration failed: dps calibrate: use a longer log")
    ]
    assert found["routing"]["recommended"]["time"] == "2026-01-01T03:00:10Z"
    assert harness.policy() == ("TotalLength", 900)


async def test_the_newest_of_several_results_counts() -> None:
    harness = CalibrationHarness({})
    for day, threshold in ((2, 200), (1, 100)):
        result = json.dumps({**FOUND, "thresholdTokens": threshold})
        harness.end(f"day-{day}", 0, result, f"2026-01-0{day}T03:00:10Z")
    assert (await harness.settle())["routing"]["recommended"]["thresholdTokens"] == 200


@pytest.mark.parametrize("message", ["", "x" * 100, "{}", json.dumps({**FOUND, "thresholdTokens": -1})])
async def test_an_unreadable_result_is_reported_and_not_applied(message: str) -> None:
    harness = await calibrated_harness({"apply": True})
    harness.end("two", 0, message, "2026-01-02T03:00:10Z")
    found = await harness.settle()
    ((status, reason, text),) = found["condition"]
    assert (status, reason) == ("False", "CalibrationFailed")
    assert "cannot be read: " in text
    assert len(text) < 300
    assert found["routing"]["recommended"]["time"] == "2026-01-01T03:00:10Z"
    assert harness.policy() == ("TotalLength", 900)


@pytest.mark.parametrize("ran", [True, False], ids=["it ran", "its image could not be pulled"])
async def test_a_calibration_that_the_kubelet_has_stopped_is_reported_with_the_reason(ran: bool) -> None:
    harness = await calibrated_harness({})
    harness.end("two", 137, "reading …", "2026-01-02T04:00:10Z")
    stopped = harness.cluster.objects["Pod", KEY[0], "two"]
    stopped["metadata"]["creationTimestamp"] = "2026-01-02T03:00:10Z"
    stopped["status"] |= {"phase": "Failed", "message": "Pod was active longer than the deadline"}
    if not ran:
        stopped["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = None
    found = await harness.settle()
    text = "the last calibration failed: Pod was active longer than the deadline"
    assert found["condition"] == [("False", "CalibrationFailed", text)]
    assert found["routing"]["recommended"]["time"] == "2026-01-01T03:00:10Z"


async def test_the_recommendation_disappears_with_the_calibration() -> None:
    harness = await calibrated_harness({"apply": True})
    harness.edit(SMALLEST)
    assert await harness.settle() == {
        "routing": {"policy": "DeltaPrefill", "thresholdTokens": 128},
        "condition": [],
    }
    assert harness.cluster.names("CronJob") == set()
