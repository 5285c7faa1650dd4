"""One DPSRouter from `kubectl apply` to Ready and through all that happens to it, on a real API server.

kwok plays the nodes and the kubelet. The operator runs with the rights of the chart's ServiceAccount.
"""

from collections import Counter
from typing import Any

import pytest
import yaml

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
OURS = "dpsrouter.io/router=qwen"
HASH = "dpsrouter.io/template-hash"
FATE = "dps-test/fate"


def children(kube: Kube) -> list[str]:
    return sorted(f"{one['kind']}/{one['metadata']['name']}" for one in kube.list(EVERY_KIND, OURS))


def ready(kube: Kube, **change: Any) -> None:
    kube.apply(router(**change))
    kube.until("qwen", Ready="True", Progressing="Settled")


def pods(kube: Kube, component: str) -> dict[str, Manifest]:
    found = kube.list("pod", f"{OURS},dpsrouter.io/component={component}")
    return {one["metadata"]["name"]: one for one in found if "deletionTimestamp" not in one["metadata"]}


def deployment(kube: Kube, component: str) -> Manifest:
    return kube.get("deployment", f"qwen-{component}")


def fate(kind: str) -> Manifest:
    return {"podTemplate": {"metadata": {"annotations": {FATE: kind}}}}


def test_the_smallest_router_becomes_ready(kube: Kube) -> None:
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
        "Secret/qwen-redis",
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
    # Not the node of 40 GB, nor the one whose further taint nothing tolerates.
    "speculative": {"a100-0", "aks-0"},
    "greedy": {"a100-0", "aks-0"},
    "gateway": {"cpu-0"},
    "redis": {"cpu-0"},
}


def test_a_change_of_routing_reaches_the_gateways_and_restarts_nobody(kube: Kube) -> None:
    ready(kube)
    before = {pod["metadata"]["uid"]: pod for name in NODES for pod in pods(kube, name).values()}
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 512, "sessionTTLSeconds": 60}}})

    def told() -> None:
        config = yaml.safe_load(kube.get("configmap", "qwen-gateway")["data"]["config.yaml"])
        assert config["routing"] == {"policy": "DeltaPrefill", "thresholdTokens": 512}
        assert config["session"]["ttlSeconds"] == 60
        # A pod that is touched has its volumes looked at by the kubelet at once.
        hashes = {
            pod["metadata"]["annotations"]["dpsrouter.io/config-hash"]
            for pod in pods(kube, "gateway").values()
        }
        old = {pod["metadata"]["annotations"].get("dpsrouter.io/config-hash") for pod in gateways(before)}
        assert len(hashes) == 1
        assert hashes.isdisjoint(old)
        assert kube.get("dpsrouter", "qwen")["status"]["routing"]["thresholdTokens"] == 512

    eventually(told)
    after = {pod["metadata"]["uid"] for name in NODES for pod in pods(kube, name).values()}
    assert after == set(before)


def gateways(found: dict[str, Manifest]) -> list[Manifest]:
    return [pod for pod in found.values() if pod["metadata"]["labels"]["dpsrouter.io/component"] == "gateway"]


DRIFT: dict[str, tuple[str, str, Manifest]] = {
    "how it rolls": ("deployment", "qwen-greedy", {"spec": {"strategy": {"rollingUpdate": {"maxSurge": 5}}}}),
    "a port": ("service", "qwen-gateway", {"spec": {"ports": [{"port": 1, "targetPort": 2}]}}),
    "a configuration": ("configmap", "qwen-gateway", {"data": {"config.yaml": "routing: {}"}}),
    "a right": ("role", "qwen-gateway", {"rules": []}),
    "a label": ("service", "qwen-greedy", {"metadata": {"labels": {"app.kubernetes.io/part-of": "x"}}}),
    "replicas": ("deployment", "qwen-gateway", {"spec": {"replicas": 7}}),
    "a budget": ("poddisruptionbudget", "qwen-gateway", {"spec": {"maxUnavailable": 2}}),
}


def owned(live: Manifest) -> Manifest:
    """What of an object is the operator's to decide: all but the bookkeeping and what others report."""
    kept = {key: value for key, value in live.items() if key not in ("metadata", "status")}
    return kept | {"labels": live["metadata"]["labels"]}


def test_what_others_change_is_put_back(kube: Kube) -> None:
    ready(kube)
    for kind, target, change in DRIFT.values():
        before = owned(kube.get(kind, target))
        kube.patch(kind, target, change)

        def back(kind: str = kind, target: str = target, before: Manifest = before) -> None:
            assert owned(kube.get(kind, target)) == before

        eventually(back)


def test_what_others_add_is_left_alone(kube: Kube) -> None:
    ready(kube)
    kube.patch("deployment", "qwen-gateway", {"metadata": {"annotations": {"team": "serving"}}})
    kube.patch("service", "qwen-gateway", {"spec": {"sessionAffinity": "ClientIP"}})
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 1}}})
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert deployment(kube, "gateway")["metadata"]["annotations"]["team"] == "serving"
    assert kube.get("service", "qwen-gateway")["spec"]["sessionAffinity"] == "ClientIP"


def test_deleted_children_return(kube: Kube) -> None:
    ready(kube)
    before = children(kube)
    kube.kubectl("delete", "deployment,service,configmap,poddisruptionbudget,role,serviceaccount", "-l", OURS)

    def back() -> None:
        assert children(kube) == before

    eventually(back)
    kube.until("qwen", Ready="True", Progressing="Settled")


def test_a_deleted_password_is_made_anew_and_both_ends_take_it(kube: Kube) -> None:
    ready(kube)
    old = kube.get("secret", "qwen-redis")["data"]
    before = set(pods(kube, "gateway")), kube.get("pod", "qwen-redis-0")["metadata"]["uid"]
    kube.kubectl("delete", "secret", "qwen-redis")

    def restarted() -> None:
        assert kube.get("secret", "qwen-redis")["data"] != old
        assert set(pods(kube, "gateway")).isdisjoint(before[0])
        assert kube.get("pod", "qwen-redis-0")["metadata"]["uid"] != before[1]

    eventually(restarted)
    kube.until("qwen", Ready="True", Progressing="Settled")


OPTIONS: Manifest = {
    "model": {"cache": {"size": "10Gi"}},
    "pools": {"greedy": {"autoscaling": {"minReplicas": 2, "maxReplicas": 4}}},
    "gateway": {
        "autoscaling": {"maxReplicas": 4},
        "ingress": {"host": "llm.example.com", "className": "nginx", "tlsSecretName": "tls"},
    },
    "networkPolicy": {},
}


def test_options_that_are_removed_remove_their_children(kube: Kube) -> None:
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


def test_a_redis_of_the_users_takes_the_place_of_the_managed_one(kube: Kube) -> None:
    kube.kubectl("create", "secret", "generic", "redis", "--from-literal", "url=redis://redis:6379")
    ready(kube)
    ready(kube, sessionStore={"urlSecretRef": {"name": "redis", "key": "url"}})

    def gone() -> None:
        assert not [name for name in children(kube) if name.endswith(("-redis", "-redis-0"))]

    eventually(gone)
    assert kube.condition("qwen", "SessionStoreReady")["reason"] == "External"


def test_an_autoscaler_takes_the_replicas_over_where_they_are(kube: Kube) -> None:
    ready(kube, pools={"greedy": {"replicas": 3}})
    before = set(pods(kube, "greedy"))
    ready(kube, pools={"greedy": {"autoscaling": {"minReplicas": 1, "maxReplicas": 5}}})
    kube.kubectl("scale", "deployment/qwen-greedy", "--replicas", "4")
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert deployment(kube, "greedy")["spec"]["replicas"] == 4
    assert before <= set(pods(kube, "greedy"))


def test_engines_change_one_pool_after_the_other_and_a_broken_one_stops_at_the_first(kube: Kube) -> None:
    ready(kube)
    old = deployment(kube, "greedy")["metadata"]["annotations"][HASH]
    broken = {"args": ["--mem-fraction-static", "0.99"]}
    kube.apply(router(engine=broken, pools={"speculative": fate("crash")}))
    kube.until("qwen", Progressing="RollingOut", Ready="True")
    message = "the greedy pool changes when the speculative pool has finished changing"

    def waits() -> None:
        assert kube.condition("qwen", "Progressing")["message"] == message
        assert len(pods(kube, "speculative")) == 2

    eventually(waits)
    assert deployment(kube, "greedy")["metadata"]["annotations"][HASH] == old
    kube.apply(router(engine=broken))
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert deployment(kube, "greedy")["metadata"]["annotations"][HASH] != old


def test_arguments_that_the_operator_sets_are_refused_and_what_runs_stays(kube: Kube) -> None:
    ready(kube)
    before = {name: deployment(kube, name)["metadata"]["generation"] for name in ("speculative", "greedy")}
    kube.apply(router(engine={"args": ["--port=1"]}))
    kube.until("qwen", SpecValid="InvalidSpec", Ready="InvalidSpec")
    assert kube.condition("qwen", "SpecValid")["message"] == (
        "spec.engine.args: --port is set by the operator; remove it; what ran before keeps running"
    )
    after = {name: deployment(kube, name)["metadata"]["generation"] for name in before}
    assert after == before
    ready(kube)


def test_what_the_api_server_refuses_in_a_pod_template_is_told(kube: Kube) -> None:
    kube.apply(router(gateway={"podTemplate": {"spec": {"restartPolicy": "Sometimes"}}}))
    kube.until("qwen", SpecValid="InvalidSpec")
    assert "Deployment qwen-gateway" in kube.condition("qwen", "SpecValid")["message"]


def test_a_kind_that_is_not_installed_is_named(kube: Kube) -> None:
    kube.apply(router(telemetry={"serviceMonitor": {}}))
    kube.until("qwen", SpecValid="InvalidSpec", SpeculativePoolReady="True")
    assert kube.condition("qwen", "SpecValid")["message"].startswith(
        "ServiceMonitor is unknown to this cluster"
    )


def test_an_object_of_somebody_else_is_not_taken_over(kube: Kube) -> None:
    kube.kubectl("create", "configmap", "qwen-gateway", "--from-literal", "mine=yes")
    kube.apply(router())
    kube.until("qwen", SpecValid="InvalidSpec")
    assert "is not this DPSRouter's" in kube.condition("qwen", "SpecValid")["message"]
    assert kube.get("configmap", "qwen-gateway")["data"] == {"mine": "yes"}


TROUBLES: dict[str, tuple[Manifest, str, str]] = {
    "no such GPU": (
        {"nodePool": {"nodeSelector": {"team": "nobody"}}},
        "WaitingForGPU",
        "add a node with a free GPU",
    ),
    "a crash": ({"pools": {"speculative": fate("crash")}}, "CrashLooping", "increase --mem-fraction-static"),
    "no image": (
        {"pools": {"speculative": fate("pull")}},
        "ImagePullFailed",
        "cannot pull lmsysorg",
    ),
    "loading": ({"pools": {"speculative": fate("loading")}}, "LoadingModel", "is loading its model"),
}


@pytest.mark.parametrize(("change", "reason", "words"), TROUBLES.values(), ids=TROUBLES.keys())
def test_what_keeps_a_pool_from_serving_is_told(
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


def test_a_settled_router_is_written_to_no_more(kube: Kube, operator: Operator) -> None:
    ready(kube)

    def calm() -> int:
        before = operator.writes()
        versions = {one["metadata"]["resourceVersion"] for one in kube.list(EVERY_KIND, OURS)}
        kube.patch("pod", "qwen-redis-0", {"metadata": {"annotations": {"look": str(before)}}})
        eventually(lambda: _passed(operator), 10)
        assert operator.writes() == before
        assert {one["metadata"]["resourceVersion"] for one in kube.list(EVERY_KIND, OURS)} == versions
        return before

    eventually(calm)


def _passed(operator: Operator) -> None:
    assert "dps_operator_queue_length 0.0" in operator.get("/metrics")


def test_a_deleted_router_takes_everything_with_it(kube: Kube) -> None:
    ready(kube, model={"cache": {"size": "10Gi"}}, networkPolicy={})
    kube.kubectl("delete", "dpsrouter", "qwen", "--timeout", "30s")

    def gone() -> None:
        assert children(kube) == []

    eventually(gone)


def test_a_router_made_again_at_once_gets_children_of_its_own(kube: Kube) -> None:
    ready(kube)
    kube.kubectl("delete", "dpsrouter", "qwen", "--timeout", "30s")
    ready(kube)
    uid = kube.get("dpsrouter", "qwen")["metadata"]["uid"]
    owners = {
        owner["uid"]
        for one in kube.list("deployment,service,configmap,secret", OURS)
        for owner in one["metadata"]["ownerReferences"]
    }
    assert owners == {uid}


def test_the_gateway_may_watch_endpoints_and_nothing_else(kube: Kube) -> None:
    ready(kube)
    account = f"system:serviceaccount:{kube.namespace}:qwen-gateway"

    def may(verb: str, what: str) -> bool:
        try:
            return kube.kubectl("auth", "can-i", verb, what, "--as", account).strip() == "yes"
        except RefusedError:
            return False

    assert may("watch", "endpointslices.discovery.k8s.io")
    assert not any(may(*asked) for asked in (("get", "secrets"), ("list", "pods"), ("create", "pods")))


def test_what_is_ours_satisfies_the_restricted_pod_security_standard(kube: Kube) -> None:
    kube.kubectl("label", "namespace", kube.namespace, "pod-security.kubernetes.io/enforce=baseline")
    ready(kube)
    kube.kubectl(
        "label", "namespace", kube.namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite"
    )
    before = {**pods(kube, "gateway"), **pods(kube, "redis")}
    # At once: what is tested is whether their successors are admitted, not how a kubelet says goodbye.
    kube.kubectl("delete", "pod", *before, "--force", "--grace-period=0", "--wait=false")

    def succeeded() -> None:
        after = {**pods(kube, "gateway"), **pods(kube, "redis")}
        assert len(after) == len(before) == 3
        assert not {one["metadata"]["uid"] for one in before.values()} & {
            one["metadata"]["uid"] for one in after.values()
        }

    eventually(succeeded)


def test_two_routers_share_a_namespace(kube: Kube) -> None:
    kube.apply(router("qwen"), router("qwen-gateway", routing={"policy": "AlwaysGreedy"}))
    kube.until("qwen", Ready="True")
    kube.until("qwen-gateway", Ready="True")
    assert kube.get("service", "qwen-gateway")["metadata"]["labels"]["dpsrouter.io/router"] == "qwen"
    kube.kubectl("delete", "dpsrouter", "qwen-gateway")
    eventually(lambda: _only(kube, "qwen"))


def _only(kube: Kube, name: str) -> None:
    owners = {
        one["metadata"]["labels"]["dpsrouter.io/router"]
        for one in kube.list(EVERY_KIND, "dpsrouter.io/router")
    }
    assert owners == {name}
