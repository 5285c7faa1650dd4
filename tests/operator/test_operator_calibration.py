"""Calibrations: the CronJob, how its result reaches the status, and when the gateways use it."""

import json
from typing import Any

import pytest
import yaml

from dps_operator.builders.calibration import calibration_cron_job
from dps_operator.builders.gateway import gateway_deployment
from dps_operator.builders.gateway_config import gateway_config
from dps_operator.builders.network import network_policies
from dps_operator.cluster import Cluster
from dps_operator.errors import SpecError
from dps_operator.observe import Observations
from dps_operator.reconcile import Reconciler
from dps_operator.resources import Router
from dps_testkit.operator.fake_cluster import FakeCluster
from dps_testkit.operator.objects import pod, waiting
from dps_testkit.operator.routers import PREFIX_CACHE, SETTINGS, SMALLEST, router

KEY = ("serving", "qwen")
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


def test_the_cron_job_calibrates_the_fleet_on_the_logs_of_all_gateways() -> None:
    (job,) = calibration_cron_job(calibrated({}), SETTINGS)
    spec = job["spec"]
    assert {key: spec[key] for key in ("schedule", "timeZone", "concurrencyPolicy", "suspend")} == {
        "schedule": "0 3 * * *",
        "timeZone": "Etc/UTC",
        "concurrencyPolicy": "Forbid",
        "suspend": False,
    }
    (container,) = spec["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["terminationMessagePath"]) == ("lab:1", "/dev/termination-log")
    assert arguments(calibrated({})) == {
        "--workload": "http://qwen-metrics.serving.svc:9090/decisions",
        "--fleet": "speculative=1,greedy=1",
        "--replicas": "2",
        "--cache": "separate",
        "--hardware": "a100-7b",
        "--algorithm": "STANDALONE",
        "--objective": "session",
        "--recommendation": "/dev/termination-log",
    }


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


def test_engines_that_share_a_gpu_share_it_in_the_simulation() -> None:
    found = arguments(calibrated({}, placement="SharedGPU"))
    assert (found["--fleet"], found["--one-gpu"]) == ("speculative=1,greedy=1", "")
    assert "--one-gpu" not in arguments(calibrated({}))


def test_suspended_engines_are_not_calibrated() -> None:
    (job,) = calibration_cron_job(calibrated({}, suspend=True), SETTINGS)
    assert job["spec"]["suspend"] is True


def test_a_name_that_is_too_long_for_a_cron_job_is_an_error() -> None:
    spec = {**SMALLEST, "routing": {"calibration": {}}}
    assert calibration_cron_job(router(spec, "r" * 40), SETTINGS)
    with pytest.raises(SpecError, match="at most 40 characters"):
        calibration_cron_job(router(spec, "r" * 41), SETTINGS)


def test_gateways_keep_a_decision_log_and_admit_the_calibration() -> None:
    plain, logged = router(SMALLEST), calibrated({}, networkPolicy={})
    assert "decisionLog" not in gateway_config(plain)["routing"]
    assert gateway_config(logged)["routing"]["decisionLog"] == "/var/cache/dps/decisions.jsonl"
    templates = [gateway_deployment(one, SETTINGS, "")["spec"]["template"] for one in (plain, logged)]
    assert templates[0]["metadata"]["annotations"] != templates[1]["metadata"]["annotations"], "no restart"
    policy = network_policies(logged)[0]
    (admin,) = [rule for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == 9090]
    components = [each["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for each in admin["from"]]
    assert components == ["gateway", "calibration"]


class CalibrationHarness:
    """An operator with one DPSRouter."""

    def __init__(self, calibration: dict[str, Any] | None) -> None:
        self.cluster = FakeCluster()
        self.seen = Observations()
        typed: Cluster = self.cluster
        self.reconciler = Reconciler(typed, self.seen, SETTINGS, lambda: "2026-01-01T00:00:00Z")
        routing = {} if calibration is None else {"routing": {"calibration": calibration}}
        body = {"apiVersion": "dpsrouter.io/v1alpha1", "kind": "DPSRouter", "spec": {**SMALLEST, **routing}}
        self.cluster.store({**body, "metadata": {"name": KEY[1], "namespace": KEY[0], "generation": 1}})
        self.seen.update_router(self.cluster.objects["DPSRouter", *KEY])

    def end(self, name: str, exit_code: int, message: str, time: str) -> None:
        """End the pod of a calibration."""
        terminated = {"exitCode": exit_code, "message": message, "finishedAt": time}
        status = {"name": "calibration", "ready": False, "state": {"terminated": terminated}}
        self.seen.update_pod(pod(name, "calibration", containerStatuses=[status]))

    async def settle(self) -> dict[str, Any]:
        """Reconcile twice, as after the change of the status; returns status.routing and the condition."""
        for _ in range(2):
            await self.reconciler.reconcile(KEY)
        status = self.cluster.objects["DPSRouter", *KEY]["status"]
        condition = [each for each in status["conditions"] if each["type"] == "RoutingCalibrated"]
        return {
            "routing": status["routing"],
            "condition": [(each["status"], each["reason"], each["message"]) for each in condition],
        }

    def policy(self) -> tuple[str, int]:
        """The policy and the threshold in the gateways' configuration."""
        text = self.cluster.objects["ConfigMap", KEY[0], "qwen-gateway"]["data"]["config.yaml"]
        routing = yaml.safe_load(text)["routing"]
        return routing["policy"], routing["thresholdTokens"]


async def test_without_calibration_there_is_no_condition() -> None:
    assert await CalibrationHarness(None).settle() == {
        "routing": {"policy": "DeltaPrefill", "thresholdTokens": 128},
        "condition": [],
    }


async def test_before_the_first_calibration_nothing_is_recommended() -> None:
    found = await CalibrationHarness({"apply": True}).settle()
    assert found["routing"] == {"policy": "DeltaPrefill", "thresholdTokens": 128}
    ((status, reason, message),) = found["condition"]
    assert (status, reason) == ("Unknown", "NotCalibrated")
    assert "kubectl create job --from=cronjob/qwen-calibration" in message


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
    harness = CalibrationHarness({"apply": True})
    harness.end("one", 0, json.dumps(FOUND), "2026-01-01T03:00:10Z")
    await harness.settle()
    harness.seen.update_pod(pod("one", "calibration"), deleted=True)
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


UNREADABLE = {
    "": 'its termination message "" is not JSON',
    "x" * 100: f'its termination message "{"x" * 80}…" is not JSON',
    "two\nlines": r'its termination message "two\nlines" is not JSON',
    "[]": 'its termination message "[]" is not a JSON object',
    "{}": "policy in its termination message: Field required",
    json.dumps({**FOUND, "thresholdTokens": -1}): (
        "thresholdTokens in its termination message: Input should be greater than or equal to 0"
    ),
}


@pytest.mark.parametrize("message", UNREADABLE, ids=repr)
async def test_an_unreadable_result_is_reported_and_not_applied(message: str) -> None:
    harness = CalibrationHarness({"apply": True})
    harness.end("one", 0, json.dumps(FOUND), "2026-01-01T03:00:10Z")
    await harness.settle()
    harness.end("two", 0, message, "2026-01-02T03:00:10Z")
    found = await harness.settle()
    assert found["condition"] == [
        (
            "False",
            "CalibrationFailed",
            f"the result of the last calibration cannot be read: {UNREADABLE[message]}; check that labImage in the "
            "chart's values has the version of the operator",
        )
    ]
    assert found["routing"]["recommended"]["time"] == "2026-01-01T03:00:10Z"
    assert harness.policy() == ("TotalLength", 900)


async def test_an_unreadable_first_result_is_not_recommended() -> None:
    harness = CalibrationHarness({"apply": True})
    harness.end("one", 0, "", "2026-01-01T03:00:10Z")
    found = await harness.settle()
    assert [condition[:2] for condition in found["condition"]] == [("False", "CalibrationFailed")]
    assert "recommended" not in found["routing"]
    assert harness.policy() == ("DeltaPrefill", 128)


async def test_a_calibration_that_cannot_start_is_reported() -> None:
    harness = CalibrationHarness({})
    harness.seen.update_pod(
        pod(
            "one",
            "calibration",
            containerStatuses=[{**waiting("ImagePullBackOff"), "name": "calibration", "image": "lab:1"}],
        )
    )
    ((status, reason, _),) = (await harness.settle())["condition"]
    assert (status, reason) == ("False", "ImagePullFailed")


STOPPED = "2026-01-02T03:00:00Z"
RUNS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "stopped": (
        {"lastScheduleTime": STOPPED, "lastSuccessfulTime": "2026-01-01T03:00:12Z"},
        ("False", "CalibrationFailed"),
    ),
    "running": (
        {"lastScheduleTime": STOPPED, "active": [{"kind": "Job", "name": "now"}]},
        ("True", "Recommended"),
    ),
    "successful": (
        {"lastScheduleTime": STOPPED, "lastSuccessfulTime": "2026-01-02T03:00:12Z"},
        ("True", "Recommended"),
    ),
    "scheduled before one that was started by hand": (
        {"lastScheduleTime": "2026-01-01T03:00:00Z"},
        ("True", "Recommended"),
    ),
}


@pytest.mark.parametrize(("status", "expected"), RUNS.values(), ids=RUNS.keys())
async def test_a_calibration_whose_pod_kubernetes_has_deleted_is_reported(
    status: dict[str, Any], expected: tuple[str, str]
) -> None:
    harness = CalibrationHarness({})
    harness.end("one", 0, json.dumps(FOUND), "2026-01-01T03:00:10Z")
    await harness.settle()
    harness.seen.update_pod(pod("one", "calibration"), deleted=True)
    job = harness.cluster.objects["CronJob", KEY[0], "qwen-calibration"]
    harness.seen.update_child(job | {"status": status})
    found = await harness.settle()
    ((value, reason, message),) = found["condition"]
    assert (value, reason) == expected
    assert (STOPPED in message) == (reason == "CalibrationFailed")
    assert found["routing"]["recommended"]["time"] == "2026-01-01T03:00:10Z"


async def test_the_recommendation_disappears_with_the_calibration() -> None:
    harness = CalibrationHarness({"apply": True})
    harness.end("one", 0, json.dumps(FOUND), "2026-01-01T03:00:10Z")
    await harness.settle()
    body = harness.cluster.objects["DPSRouter", *KEY]
    del body["spec"]["routing"]
    harness.seen.update_router(body)
    assert await harness.settle() == {
        "routing": {"policy": "DeltaPrefill", "thresholdTokens": 128},
        "condition": [],
    }
    assert ("CronJob", KEY[0], "qwen-calibration") not in harness.cluster.objects
