"""The conditions and events of a DPSRouter that cannot be served as its spec demands."""

from collections import Counter

import pytest

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import Operator
from e2e.cluster.routers import router
from e2e.control_plane.objects import deployment, fate, ready

pytest_plugins = ["e2e.cluster.fixtures"]
pytestmark = pytest.mark.usefixtures("operator")


def test_autoscaler_without_its_metric_is_reported(kube: Kube) -> None:
    ready(kube, pools={"greedy": {"autoscaling": {"minReplicas": 1, "maxReplicas": 5}}})
    kube.until("qwen", 60, Ready="True", AutoscalingActive="AutoscalerFailed")
    message = kube.condition("qwen", "AutoscalingActive")["message"]
    assert message.startswith("the autoscaler of the greedy pool does not work: ")
    assert "dps_demand" in message


def test_reserved_engine_arguments_are_rejected_and_workloads_keep_running(kube: Kube) -> None:
    ready(kube)
    before = {name: deployment(kube, name)["metadata"]["generation"] for name in ("speculative", "greedy")}
    kube.apply(router(engine={"args": ["--port=1"]}))
    kube.until("qwen", SpecValid="InvalidSpec", Ready="InvalidSpec")
    assert kube.condition("qwen", "SpecValid")["message"] == (
        "spec.engine.args: --port is set by the operator; remove it; running workloads are not changed"
    )
    after = {name: deployment(kube, name)["metadata"]["generation"] for name in before}
    assert after == before
    ready(kube)


def test_pod_template_rejected_by_the_api_server_is_reported(kube: Kube) -> None:
    kube.apply(router(gateway={"podTemplate": {"spec": {"restartPolicy": "Sometimes"}}}))
    kube.until("qwen", SpecValid="InvalidSpec")
    assert "Deployment qwen-gateway" in kube.condition("qwen", "SpecValid")["message"]


def test_missing_resource_kind_is_named_in_the_condition(kube: Kube) -> None:
    kube.apply(router(telemetry={"serviceMonitor": {}}))
    kube.until("qwen", Monitored="CRDNotInstalled", SpecValid="True", Ready="True")
    assert kube.condition("qwen", "Monitored")["message"].startswith(
        "ServiceMonitor is not installed in this cluster"
    )


TROUBLES: dict[str, tuple[Manifest, str, str]] = {
    "no matching GPU node": (
        {"nodePool": {"nodeSelector": {"team": "nobody"}}},
        "WaitingForGPU",
        "add a node that spec.nodePool selects and that has a free GPU",
    ),
    "crash loop": (
        {"pools": {"speculative": fate("crash")}},
        "CrashLooping",
        "increase --mem-fraction-static",
    ),
    "image pull failure": (
        {"pools": {"speculative": fate("pull")}},
        "ImagePullFailed",
        "cannot pull lmsysorg",
    ),
    "model loading": ({"pools": {"speculative": fate("loading")}}, "LoadingModel", "is loading its model"),
}


@pytest.mark.parametrize(("change", "reason", "words"), TROUBLES.values(), ids=TROUBLES.keys())
def test_pool_condition_gives_the_reason_for_not_serving(
    kube: Kube, change: Manifest, reason: str, words: str
) -> None:
    kube.apply(router(**change))
    kube.until("qwen", SpeculativePoolReady=reason, Ready=reason)
    assert words in kube.condition("qwen", "SpeculativePoolReady")["message"]


def test_events_are_posted_once(kube: Kube, operator: Operator) -> None:
    ready(kube)
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 2}}})
    kube.until("qwen", Ready="True", Progressing="Settled")
    posted = Counter(
        event["reason"]
        for event in kube.get("events")["items"]
        if event["involvedObject"]["kind"] == "DPSRouter"
    )
    assert posted["Accepted"] == 1
    assert posted["Serving"] == 1
