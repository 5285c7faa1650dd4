"""Changes to the spec of a running DPSRouter: routing, options, scaling, pauses and rollouts."""

from pathlib import Path

import pytest
import yaml

from dps_testkit.cluster.kube import Kube, Manifest, decoded
from dps_testkit.waiting import eventually
from e2e.cluster.routers import router
from e2e.control_plane.objects import HASH, children, deployment, fate, pods, ready
from e2e.node.commands import run_documented

pytest_plugins = ["e2e.cluster.fixtures"]

pytestmark = pytest.mark.usefixtures("shared_operator")

COMPONENTS = ("speculative", "greedy", "gateway", "redis")


def test_routing_change_reaches_gateways_without_restarting_pods(kube: Kube) -> None:
    ready(kube)
    before = {pod["metadata"]["uid"]: pod for name in COMPONENTS for pod in pods(kube, name).values()}
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 512, "sessionTTLSeconds": 60}}})

    def propagated() -> None:
        config = yaml.safe_load(kube.get("configmap", "qwen-gateway")["data"]["config.yaml"])
        assert config["routing"] == {"policy": "DeltaPrefill", "thresholdTokens": 512}
        assert config["session"]["ttlSeconds"] == 60
        assert kube.get("dpsrouter", "qwen")["status"]["routing"]["thresholdTokens"] == 512

    eventually(propagated)
    after = {pod["metadata"]["uid"] for name in COMPONENTS for pod in pods(kube, name).values()}
    assert after == set(before)


OPTIONS: Manifest = {
    "model": {"cache": {"size": "10Gi"}},
    "pools": {"greedy": {"autoscaling": {"minReplicas": 2, "maxReplicas": 4}}},
    "gateway": {
        "autoscaling": {"maxReplicas": 4},
        "ingress": {"host": "llm.example.com", "className": "nginx", "tlsSecretName": "tls"},
    },
    "networkPolicy": {},
}


def test_removing_an_option_removes_its_children(kube: Kube) -> None:
    ready(kube)
    plain = children(kube)
    ready(kube, **OPTIONS)
    assert set(children(kube)) - set(plain) == {
        "HorizontalPodAutoscaler/qwen-gateway",
        "HorizontalPodAutoscaler/qwen-greedy",
        "Ingress/qwen-gateway",
        "NetworkPolicy/qwen-gateway",
        "NetworkPolicy/qwen-greedy",
        "NetworkPolicy/qwen-redis",
        "NetworkPolicy/qwen-speculative",
        "PersistentVolumeClaim/qwen-models",
        "PodDisruptionBudget/qwen-greedy",
    }
    kube.apply(router())

    def gone() -> None:
        assert children(kube) == plain

    eventually(gone)
    kube.until("qwen", Ready="True", Progressing="Settled")


def test_redis_that_cannot_start_is_replaced_when_the_spec_is_corrected(kube: Kube) -> None:
    nowhere = {"podTemplate": {"spec": {"nodeSelector": {"disk": "absent"}}}}
    kube.apply(router(sessionStore={"managed": nowhere}))
    kube.until("qwen", SessionStoreReady="Unschedulable", Ready="Unschedulable")
    ready(kube)


def test_enabling_autoscaling_keeps_the_current_replicas(kube: Kube) -> None:
    ready(kube, pools={"greedy": {"replicas": 3}})
    before = set(pods(kube, "greedy"))
    ready(kube, pools={"greedy": {"autoscaling": {"minReplicas": 1, "maxReplicas": 5}}})
    kube.kubectl("scale", "deployment/qwen-greedy", "--replicas", "4")
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert deployment(kube, "greedy")["spec"]["replicas"] == 4
    assert before <= set(pods(kube, "greedy"))


def test_pool_with_external_scaling_is_scaled_by_others_even_to_zero(kube: Kube) -> None:
    ready(kube, pools={"greedy": {"replicas": 2}})
    ready(kube, pools={"greedy": {"scaling": "External"}})
    assert deployment(kube, "greedy")["spec"]["replicas"] == 2
    kube.kubectl("scale", "deployment/qwen-greedy", "--replicas", "3")
    eventually(lambda: _has_ready_replicas(kube, "greedy", 3))
    assert kube.get("dpsrouter", "qwen")["status"]["pools"]["greedy"]["scaling"] == "External"
    kube.kubectl("scale", "deployment/qwen-greedy", "--replicas", "0")
    kube.until("qwen", GreedyPoolReady="ScaledToZero", Ready="ScaledToZero")
    ready(kube, pools={"greedy": {"replicas": 2}})
    assert deployment(kube, "greedy")["spec"]["replicas"] == 2


def _has_ready_replicas(kube: Kube, component: str, count: int) -> None:
    assert deployment(kube, component).get("status", {}).get("readyReplicas") == count


def test_documented_commands_change_a_router_its_api_keys_and_its_password(
    kube: Kube, tmp_path: Path
) -> None:
    ready(kube)

    def password() -> str | None:
        found: str | None = kube.get("secret", "dps-router-credentials")["data"].get("qwen-redis.password")
        return found

    before = password()
    assert '"revisions"' in run_documented(Path(__file__), kube, 60.0, tmp_path)
    keys = decoded(kube.get("secret", "qwen-api-keys"))["keys"]
    assert [line.split(":")[0] for line in keys.splitlines()] == ["team-a", "team-b"]
    assert decoded(kube.get("secret", "sessions"))["url"].startswith("rediss://")
    kube.until("qwen", Ready="Suspended")
    assert kube.get("dpsrouter", "qwen")["spec"]["engine"]["upgradePolicy"] == "Automatic"

    def renewed() -> None:
        assert password() not in (None, before)

    eventually(renewed)


def test_strategy_can_be_changed_to_recreate_and_back(kube: Kube) -> None:
    ready(kube)
    ready(kube, pools={"greedy": {"strategy": {"type": "Recreate"}}})
    assert deployment(kube, "greedy")["spec"]["strategy"] == {"type": "Recreate"}
    ready(
        kube, engine={"args": ["--log-level", "debug"]}, pools={"greedy": {"strategy": {"type": "Recreate"}}}
    )
    ready(kube, pools={"greedy": {"strategy": {"maxSurge": 0, "maxUnavailable": 1}}})
    assert deployment(kube, "greedy")["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }


def test_rollout_changes_one_pool_at_a_time_and_stops_while_new_pods_of_a_pool_are_not_ready(
    kube: Kube,
) -> None:
    ready(kube)
    old = deployment(kube, "greedy")["metadata"]["annotations"][HASH]
    broken = {"args": ["--mem-fraction-static", "0.99"]}
    kube.apply(router(engine=broken, pools={"speculative": fate("crash")}))
    kube.until("qwen", Progressing="RollingOut", Ready="True")
    message = "the rollout of the greedy pool starts after that of the speculative pool"

    def second_pool_waits() -> None:
        assert kube.condition("qwen", "Progressing")["message"].startswith(message)
        assert len(pods(kube, "speculative")) == 2

    eventually(second_pool_waits)
    assert deployment(kube, "greedy")["metadata"]["annotations"][HASH] == old
    kube.apply(router(engine=broken))
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert deployment(kube, "greedy")["metadata"]["annotations"][HASH] != old
