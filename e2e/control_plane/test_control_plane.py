"""The lifecycle of a DPSRouter on a real API server: creation, changes, drift, errors and deletion.

kwok simulates the nodes and kubelets. The operator runs with the permissions of the chart's ServiceAccount.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps_gateway.api_server import ApiServer, watch_config_map
from dps_gateway.config import ConfigMapRef
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import Operator
from dps_testkit.errors import RefusedError
from dps_testkit.waiting import eventually
from e2e.cluster.routers import router

pytest_plugins = ["e2e.cluster.fixtures"]
pytestmark = pytest.mark.usefixtures("operator")

EVERY_KIND = (
    "configmap,deployment,horizontalpodautoscaler,ingress,networkpolicy,persistentvolumeclaim,"
    "poddisruptionbudget,role,rolebinding,secret,service,serviceaccount,statefulset"
)
OWNED = "dpsrouter.io/router=qwen"
HASH = "dpsrouter.io/template-hash"
FATE = "dps-test/fate"


def children(kube: Kube) -> list[str]:
    return sorted(f"{item['kind']}/{item['metadata']['name']}" for item in kube.list(EVERY_KIND, OWNED))


def ready(kube: Kube, **change: Any) -> None:
    kube.apply(router(**change))
    kube.until("qwen", Ready="True", Progressing="Settled")


def pods(kube: Kube, component: str) -> dict[str, Manifest]:
    found = kube.list("pod", f"{OWNED},dpsrouter.io/component={component}")
    return {item["metadata"]["name"]: item for item in found if "deletionTimestamp" not in item["metadata"]}


def deployment(kube: Kube, component: str) -> Manifest:
    return kube.get("deployment", f"qwen-{component}")


def fate(kind: str) -> Manifest:
    return {"podTemplate": {"metadata": {"annotations": {FATE: kind}}}}


def test_minimal_router_becomes_ready(kube: Kube) -> None:
    ready(kube)
    assert children(kube) == [
        "ConfigMap/qwen-gateway",
        "Deployment/qwen-gateway",
        "Deployment/qwen-greedy",
        "Deployment/qwen-speculative",
        "PersistentVolumeClaim/data-qwen-redis-0",
        "PodDisruptionBudget/qwen-gateway",
        "Role/qwen-gateway",
        "RoleBinding/qwen-gateway",
        "Service/qwen-gateway",
        "Service/qwen-greedy",
        "Service/qwen-metrics",
        "Service/qwen-redis",
        "Service/qwen-speculative",
        "ServiceAccount/qwen-gateway",
        "StatefulSet/qwen-redis",
    ]
    heading, row = kube.kubectl("get", "dps").splitlines()
    assert heading.split() == ["NAME", "READY", "POLICY", "THRESHOLD", "SPEC", "GREEDY", "GATEWAY", "AGE"]
    assert row.split()[:7] == ["qwen", "True", "DeltaPrefill", "128", "1", "1", "2"]
    for component, nodes in NODES.items():
        assert {pod["spec"]["nodeName"] for pod in pods(kube, component).values()} <= nodes, component


NODES = {
    # Engines run neither on the node with a 40 GB GPU nor on the node with an additional taint.
    "speculative": {"a100-0", "aks-0"},
    "greedy": {"a100-0", "aks-0"},
    "gateway": {"cpu-0"},
    "redis": {"cpu-0"},
}


def test_routing_change_reaches_gateways_without_restarting_pods(kube: Kube) -> None:
    ready(kube)
    before = {pod["metadata"]["uid"]: pod for name in NODES for pod in pods(kube, name).values()}
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 512, "sessionTTLSeconds": 60}}})

    def propagated() -> None:
        config = yaml.safe_load(kube.get("configmap", "qwen-gateway")["data"]["config.yaml"])
        assert config["routing"] == {"policy": "DeltaPrefill", "thresholdTokens": 512}
        assert config["session"]["ttlSeconds"] == 60
        assert kube.get("dpsrouter", "qwen")["status"]["routing"]["thresholdTokens"] == 512

    eventually(propagated)
    after = {pod["metadata"]["uid"] for name in NODES for pod in pods(kube, name).values()}
    assert after == set(before)


def gateway_api(kube: Kube, folder: Path) -> ApiServer:
    """The API server with the permissions of a gateway."""
    cluster = yaml.safe_load(kube.kubeconfig.read_text())["clusters"][0]["cluster"]
    token, authority = folder / "token", folder / "ca.crt"
    token.write_text(kube.kubectl("create", "token", "qwen-gateway"))
    authority.write_bytes(Path(cluster["certificate-authority"]).read_bytes())
    return ApiServer(cluster["server"], token, authority)


async def test_gateway_receives_a_routing_change_from_its_config_map(kube: Kube, tmp_path: Path) -> None:
    await asyncio.to_thread(ready, kube)
    mine = ConfigMapRef(name="qwen-gateway", namespace=kube.namespace)
    received: asyncio.Queue[str] = asyncio.Queue()
    watching = asyncio.create_task(watch_config_map(gateway_api(kube, tmp_path), mine, received.put_nowait))
    try:
        async with asyncio.timeout(60):
            first = yaml.safe_load(await received.get())
            assert first["configMap"] == {
                "name": "qwen-gateway",
                "namespace": kube.namespace,
                "key": "config.yaml",
            }
            change = {"spec": {"routing": {"thresholdTokens": 512}}}
            await asyncio.to_thread(kube.patch, "dpsrouter", "qwen", change)
            assert yaml.safe_load(await received.get())["routing"]["thresholdTokens"] == 512
    finally:
        watching.cancel()


DRIFT: dict[str, tuple[str, str, Manifest]] = {
    "rollout strategy": (
        "deployment",
        "qwen-greedy",
        {"spec": {"strategy": {"rollingUpdate": {"maxSurge": 5}}}},
    ),
    "port": ("service", "qwen-gateway", {"spec": {"ports": [{"port": 1, "targetPort": 2}]}}),
    "configuration": ("configmap", "qwen-gateway", {"data": {"config.yaml": "routing: {}"}}),
    "role rules": ("role", "qwen-gateway", {"rules": []}),
    "label": ("service", "qwen-greedy", {"metadata": {"labels": {"app.kubernetes.io/part-of": "x"}}}),
    "replicas": ("deployment", "qwen-gateway", {"spec": {"replicas": 7}}),
    "disruption budget": ("poddisruptionbudget", "qwen-gateway", {"spec": {"maxUnavailable": 2}}),
}


def owned(live: Manifest) -> Manifest:
    """The fields managed by the operator: the labels, and everything outside `metadata` and `status`."""
    kept = {key: value for key, value in live.items() if key not in ("metadata", "status")}
    return kept | {"labels": live["metadata"]["labels"]}


def test_drift_in_managed_fields_is_reverted(kube: Kube) -> None:
    ready(kube)
    for kind, target, change in DRIFT.values():
        before = owned(kube.get(kind, target))
        kube.patch(kind, target, change)

        def reverted(kind: str = kind, target: str = target, before: Manifest = before) -> None:
            assert owned(kube.get(kind, target)) == before

        eventually(reverted)


def test_unmanaged_fields_are_kept(kube: Kube) -> None:
    ready(kube)
    kube.patch("deployment", "qwen-gateway", {"metadata": {"annotations": {"team": "serving"}}})
    kube.patch("service", "qwen-gateway", {"spec": {"sessionAffinity": "ClientIP"}})
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 1}}})
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert deployment(kube, "gateway")["metadata"]["annotations"]["team"] == "serving"
    assert kube.get("service", "qwen-gateway")["spec"]["sessionAffinity"] == "ClientIP"


def test_deleted_children_are_recreated(kube: Kube) -> None:
    ready(kube)
    before = children(kube)
    kube.kubectl(
        "delete", "deployment,service,configmap,poddisruptionbudget,role,serviceaccount", "-l", OWNED
    )

    def recreated() -> None:
        assert children(kube) == before

    eventually(recreated)
    kube.until("qwen", Ready="True", Progressing="Settled")


def test_deleted_password_is_regenerated_and_redis_and_gateways_restart(kube: Kube) -> None:
    ready(kube)
    old = kube.get("secret", "dps-router-credentials")["data"]
    before = set(pods(kube, "gateway")), kube.get("pod", "qwen-redis-0")["metadata"]["uid"]
    kube.kubectl("delete", "secret", "dps-router-credentials")
    kube.kubectl("annotate", "dps/qwen", "password=changed")

    def restarted() -> None:
        assert kube.get("secret", "dps-router-credentials")["data"] != old
        assert set(pods(kube, "gateway")).isdisjoint(before[0])
        assert kube.get("pod", "qwen-redis-0")["metadata"]["uid"] != before[1]

    eventually(restarted)
    kube.until("qwen", Ready="True", Progressing="Settled")


def test_routers_of_a_namespace_share_a_secret_that_is_deleted_with_the_last(kube: Kube) -> None:
    kube.apply(router("first"), router("second"))
    for name in ("first", "second"):
        kube.until(name, Ready="True")

    def secret() -> Manifest:
        return kube.get("secret", "dps-router-credentials")

    both = secret()["data"]
    assert {name.partition("-")[0] for name in both} == {"first", "second"}
    kube.kubectl("delete", "dps/first")

    def left() -> None:
        assert secret()["data"] == {name: value for name, value in both.items() if name.startswith("second-")}

    eventually(left)
    (owner,) = secret()["metadata"]["ownerReferences"]
    assert owner["name"] == "second"
    kube.kubectl("delete", "dps/second")
    eventually(lambda: _absent(kube, "secret"))


def _absent(kube: Kube, kind: str) -> None:
    assert not kube.list(kind)


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


def test_external_redis_replaces_the_managed_one(kube: Kube) -> None:
    kube.kubectl("create", "secret", "generic", "redis", "--from-literal", "url=redis://redis:6379")
    ready(kube)
    ready(kube, sessionStore={"urlSecretRef": {"name": "redis", "key": "url"}})

    def gone() -> None:
        assert not [name for name in children(kube) if name.endswith(("-redis", "-redis-0"))]

    eventually(gone)
    assert kube.condition("qwen", "SessionStoreReady")["reason"] == "External"


def test_autoscaler_without_its_metric_is_reported(kube: Kube) -> None:
    ready(kube, pools={"greedy": {"autoscaling": {"minReplicas": 1, "maxReplicas": 5}}})
    kube.until("qwen", 60, Ready="True", AutoscalingActive="AutoscalerFailed")
    message = kube.condition("qwen", "AutoscalingActive")["message"]
    assert message.startswith("the autoscaler of the greedy pool does not work: ")
    assert "dps_in_flight" in message


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


def test_suspended_router_frees_its_gpus_and_can_be_resumed(kube: Kube) -> None:
    scaled = {"greedy": {"autoscaling": {"minReplicas": 2, "maxReplicas": 4}}}
    ready(kube, pools=scaled)
    kube.apply(router(pools=scaled, suspend=True))
    kube.until("qwen", Ready="Suspended", GatewayReady="True", SessionStoreReady="True")

    def stopped() -> None:
        assert not pods(kube, "speculative")
        assert not pods(kube, "greedy")

    eventually(stopped)
    assert len(pods(kube, "gateway")) == 2
    ready(kube, pools=scaled)
    assert len(pods(kube, "greedy")) >= 2


def test_paused_router_is_changed_only_after_the_pause(kube: Kube) -> None:
    ready(kube)
    before = deployment(kube, "greedy")["metadata"]["generation"]
    kube.apply(router(paused=True, pools={"greedy": {"replicas": 2}}))
    kube.until("qwen", Ready="True", Progressing="Paused")
    assert deployment(kube, "greedy")["metadata"]["generation"] == before
    ready(kube, pools={"greedy": {"replicas": 2}})
    assert deployment(kube, "greedy")["spec"]["replicas"] == 2


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


def test_object_with_another_owner_is_not_adopted(kube: Kube) -> None:
    kube.kubectl("create", "configmap", "qwen-gateway", "--from-literal", "mine=yes")
    kube.apply(router())
    kube.until("qwen", SpecValid="InvalidSpec")
    assert "is not owned by this DPSRouter" in kube.condition("qwen", "SpecValid")["message"]
    assert kube.get("configmap", "qwen-gateway")["data"] == {"mine": "yes"}


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


def test_settled_router_causes_no_writes(kube: Kube, operator: Operator) -> None:
    ready(kube)

    def idle() -> int:
        before = operator.writes()
        versions = {item["metadata"]["resourceVersion"] for item in kube.list(EVERY_KIND, OWNED)}
        kube.patch("pod", "qwen-redis-0", {"metadata": {"annotations": {"probe": str(before)}}})
        eventually(lambda: _queue_is_empty(operator), 10)
        assert operator.writes() == before
        assert {item["metadata"]["resourceVersion"] for item in kube.list(EVERY_KIND, OWNED)} == versions
        return before

    eventually(idle)


def _queue_is_empty(operator: Operator) -> None:
    assert "dps_operator_queue_length 0.0" in operator.get("/metrics")


def test_deleting_a_router_deletes_all_children(kube: Kube) -> None:
    ready(kube, model={"cache": {"size": "10Gi"}}, networkPolicy={})
    kube.kubectl("delete", "dpsrouter", "qwen", "--timeout", "30s")

    def gone() -> None:
        assert children(kube) == []

    eventually(gone)


def test_router_recreated_immediately_gets_new_children(kube: Kube) -> None:
    ready(kube)
    kube.kubectl("delete", "dpsrouter", "qwen", "--timeout", "30s")
    ready(kube)
    uid = kube.get("dpsrouter", "qwen")["metadata"]["uid"]
    owners = {
        owner["uid"]
        for item in kube.list("deployment,service,configmap,secret", OWNED)
        for owner in item["metadata"]["ownerReferences"]
    }
    assert owners == {uid}


def test_gateway_may_only_watch_endpoints_and_its_config_map(kube: Kube) -> None:
    ready(kube)
    account = f"system:serviceaccount:{kube.namespace}:qwen-gateway"

    def may(verb: str, resource: str) -> bool:
        try:
            return kube.kubectl("auth", "can-i", verb, resource, "--as", account).strip() == "yes"
        except RefusedError:
            return False

    assert may("watch", "endpointslices.discovery.k8s.io")
    assert may("watch", "configmaps/qwen-gateway")
    denied = (("get", "secrets"), ("list", "pods"), ("create", "pods"), ("watch", "configmaps"))
    assert not any(may(*access) for access in denied)


def test_gateway_and_redis_satisfy_the_restricted_pod_security_standard(kube: Kube) -> None:
    kube.kubectl("label", "namespace", kube.namespace, "pod-security.kubernetes.io/enforce=baseline")
    ready(kube)
    kube.kubectl(
        "label", "namespace", kube.namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite"
    )
    before = {**pods(kube, "gateway"), **pods(kube, "redis")}
    # Graceful termination is irrelevant here: only the admission of the new pods is tested.
    kube.kubectl("delete", "pod", *before, "--force", "--grace-period=0", "--wait=false")

    def replaced() -> None:
        after = {**pods(kube, "gateway"), **pods(kube, "redis")}
        assert len(after) == len(before) == 3
        assert not {item["metadata"]["uid"] for item in before.values()} & {
            item["metadata"]["uid"] for item in after.values()
        }

    eventually(replaced)


def test_two_routers_share_a_namespace(kube: Kube) -> None:
    kube.apply(router("qwen"), router("qwen-gateway", routing={"policy": "AlwaysGreedy"}))
    kube.until("qwen", Ready="True")
    kube.until("qwen-gateway", Ready="True")
    assert kube.get("service", "qwen-gateway")["metadata"]["labels"]["dpsrouter.io/router"] == "qwen"
    kube.kubectl("delete", "dpsrouter", "qwen-gateway")
    eventually(lambda: _only_owner(kube, "qwen"))


def _only_owner(kube: Kube, name: str) -> None:
    owners = {
        item["metadata"]["labels"]["dpsrouter.io/router"]
        for item in kube.list(EVERY_KIND, "dpsrouter.io/router")
    }
    assert owners == {name}
