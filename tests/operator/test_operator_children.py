"""The children of a DPSRouter, compared with golden files (see dps_testkit.operator.golden)."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from dps_engines.pools import POOLS, PoolName
from dps_gateway.config import GatewayConfig, Timeouts
from dps_gateway.runtime import FIXED_SECTIONS
from dps_operator.builders.children import children
from dps_operator.builders.engine import engine_deployment
from dps_operator.builders.gateway import DRAIN_DELAY_SECONDS, gateway_deployment
from dps_operator.builders.gateway_config import READ_AT_START, gateway_config, gateway_config_map
from dps_operator.builders.network import base_url, http_route
from dps_operator.builders.store import redis_entries
from dps_operator.errors import SpecError
from dps_operator.kinds import CHILDREN, kind_of
from dps_operator.resources import Manifest
from dps_testkit.operator.golden import CASES, HERE
from dps_testkit.operator.routers import EVERYTHING, SETTINGS, SMALLEST, router, smallest


@pytest.mark.parametrize("case", CASES)
def test_children_match_the_golden_file(case: str) -> None:
    wanted = list(yaml.safe_load_all((HERE / f"{case}.yaml").read_text()))
    assert children(router(CASES[case]), SETTINGS, "secret-uid", "cache-secret-uid") == wanted


@pytest.mark.parametrize("case", CASES)
def test_every_child_has_an_owner_a_label_and_a_watched_kind(case: str) -> None:
    made = children(router(CASES[case]), SETTINGS, "secret-uid", "cache-secret-uid")
    assert len({(one["kind"], one["metadata"]["name"]) for one in made}) == len(made)
    for one in made:
        assert kind_of(one) in CHILDREN
        assert one["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
        assert one["metadata"]["labels"]["dpsrouter.io/router"] == "qwen"


def test_gateway_configuration_matches_the_contract() -> None:
    assert gateway_config(router(EVERYTHING)) == {
        "configMap": {"name": "qwen-gateway", "namespace": "serving", "key": "config.yaml"},
        "listen": {
            "host": "0.0.0.0",
            "port": 8000,
            "adminPort": 9090,
            "adminTokenFile": "/etc/dps-admin-token/token",
        },
        "model": {"name": "llama", "tokenizer": "meta-llama/Llama-3.1-8B-Instruct"},
        "pools": {
            "speculative": {"service": {"name": "qwen-speculative", "namespace": "serving", "port": 30000}},
            "greedy": {"service": {"name": "qwen-greedy", "namespace": "serving", "port": 30000}},
        },
        "routing": {
            "policy": "TotalLength",
            "thresholdTokens": 4096,
            "decisionLog": "/var/cache/dps/decisions.jsonl",
        },
        "session": {
            "ttlSeconds": 600,
            "redisTimeoutSeconds": 0.25,
            "peers": {"service": {"name": "qwen-metrics", "namespace": "serving", "port": 9090}},
            "mirrorRecords": 100_000,
            "keys": ["header:x-session-id"],
        },
        "timeouts": {"drainSeconds": 300},
        "auth": {"keysFile": "/etc/dps-keys/keys", "isolateCache": False},
        "telemetry": {
            "otlpEndpoint": "http://collector:4317",
            "protocol": "grpc",
            "sampleRatio": 0.25,
            "serviceName": "qwen-gateway",
            "accessLog": "/dev/stdout",
        },
    }


SECTIONS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "revision of the model": ({"revision": "v2"}, {"name": "m", "tokenizer": "m", "revision": "v2"}),
    "tokenizer of another model": ({"tokenizer": "t"}, {"name": "m", "tokenizer": "t"}),
    "revision that is not the tokenizer's": (
        {"revision": "v2", "tokenizer": "t"},
        {"name": "m", "tokenizer": "t"},
    ),
    "model in an object store": (
        {"name": "s3://models/m", "servedName": "m", "tokenizer": "t"},
        {"name": "m", "tokenizer": "t"},
    ),
}


@pytest.mark.parametrize(("model", "wanted"), SECTIONS.values(), ids=SECTIONS.keys())
def test_gateway_counts_with_the_engines_tokenizer(model: dict[str, Any], wanted: dict[str, str]) -> None:
    config = gateway_config(router({**SMALLEST, "model": {"name": "m", **model}}))
    assert config["model"] == wanted
    GatewayConfig.model_validate(config)


UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "object store": ({"name": "s3://models/m"}, "cannot load a tokenizer from s3://models/m"),
    "volume of each engine pod": (
        {"name": "/models/m", "cache": {"size": "1Gi", "accessMode": "ReadWriteOnce"}},
        "/models/m is on a volume that each engine pod creates for itself",
    ),
}


@pytest.mark.parametrize(("model", "message"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_tokenizer_that_the_gateway_cannot_read_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        gateway_config(router({**SMALLEST, "model": model}))


def test_limits_timeouts_and_workers_are_passed_to_the_gateway() -> None:
    gateway = {
        "limits": {"maxInFlightPerReplica": 48, "maxQueued": 0},
        "timeouts": {"queueSeconds": 2.5, "drainDelaySeconds": 10.5},
        "workers": 4,
        "drainSeconds": 60,
    }
    made = router({**SMALLEST, "gateway": gateway})
    config = gateway_config(made)
    assert config["listen"]["workers"] == 4
    assert config["limits"] == {"maxInFlightPerReplica": 48, "maxQueued": 0}
    assert config["timeouts"] == {"drainSeconds": 60, "queueSeconds": 2.5, "drainDelaySeconds": 10.5}
    GatewayConfig.model_validate(config)
    pod = gateway_deployment(made, SETTINGS, "s")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 11 + 60 + 25


def test_names_of_the_model_and_the_timeout_of_the_session_store_are_passed_to_the_gateway() -> None:
    spec = {
        **SMALLEST,
        "gateway": {"modelAliases": ["gpt-4o"], "strictModel": False},
        "sessionStore": {"timeoutSeconds": 1.5},
    }
    config = gateway_config(router(spec))
    name = SMALLEST["model"]["name"]
    assert config["model"] == {"name": name, "tokenizer": name, "aliases": {"gpt-4o": name}, "strict": False}
    assert config["session"]["redisTimeoutSeconds"] == 1.5
    GatewayConfig.model_validate(config)


def test_grace_period_covers_the_gateways_default_delay() -> None:
    assert Timeouts().drain_delay_seconds == DRAIN_DELAY_SECONDS


@pytest.mark.parametrize("case", CASES)
def test_gateway_accepts_the_generated_configuration(case: str) -> None:
    GatewayConfig.model_validate(gateway_config(router(CASES[case])))


def test_sections_that_restart_the_gateway_are_those_it_does_not_reload() -> None:
    assert READ_AT_START == FIXED_SECTIONS


def gateway_template(spec: dict[str, Any]) -> Manifest:
    template: Manifest = gateway_deployment(router(spec), SETTINGS, "s")["spec"]["template"]
    return template


def test_routing_change_updates_the_config_map_but_not_the_pod_template() -> None:
    changed = {**SMALLEST, "routing": {"thresholdTokens": None, "sessionTTLSeconds": 9}}
    assert gateway_template(changed) == gateway_template(SMALLEST)
    assert gateway_config_map(router(changed)) != gateway_config_map(router(SMALLEST))


@pytest.mark.parametrize(
    "change",
    [
        {"telemetry": {"otlpEndpoint": "http://collector:4317"}},
        {"telemetry": {"accessLog": True}},
        {"sessionStore": {"timeoutSeconds": 1.0}},
        {"sessionStore": {"mirrorRecords": 1000}},
    ],
    ids=str,
)
def test_change_of_a_setting_that_is_read_at_start_changes_the_pod_template(change: dict[str, Any]) -> None:
    assert gateway_template({**SMALLEST, **change}) != gateway_template(SMALLEST)


def test_pods_that_are_not_ready_do_not_block_a_drain() -> None:
    budgets = [
        one for one in children(router(EVERYTHING), SETTINGS, "a") if one["kind"] == "PodDisruptionBudget"
    ]
    assert [one["metadata"]["name"] for one in budgets] == ["qwen-speculative", "qwen-greedy", "qwen-gateway"]
    assert {one["spec"].get("unhealthyPodEvictionPolicy") for one in budgets} == {"AlwaysAllow"}


@pytest.mark.parametrize("component", ["speculative", "greedy", "gateway"])
def test_component_that_may_be_scaled_up_is_drained_one_pod_at_a_time(component: str) -> None:
    scaled = {"autoscaling": {"minReplicas": 1, "maxReplicas": 8}}
    spec: dict[str, Any] = {"gateway": {"replicas": 1}, "pools": SMALLEST["pools"]}
    if component == "gateway":
        spec["gateway"] = scaled
    else:
        pools = spec["pools"]
        spec["pools"] = {**pools, component: {**pools.get(component, {}), **scaled}}
    budgets = [
        one["metadata"]["name"]
        for one in children(router({**SMALLEST, **spec}), SETTINGS, "a")
        if one["kind"] == "PodDisruptionBudget"
    ]
    assert budgets == [f"qwen-{component}"]


def test_replicas_of_engines_and_gateways_prefer_different_zones_and_nodes() -> None:
    keys = {
        one["metadata"]["name"]: [
            spread["topologyKey"] for spread in one["spec"]["template"]["spec"]["topologySpreadConstraints"]
        ]
        for one in children(router(EVERYTHING), SETTINGS, "a")
        if one["kind"] == "Deployment"
    }
    both = ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    assert keys == dict.fromkeys(("qwen-speculative", "qwen-greedy", "qwen-gateway"), both)


def test_new_password_restarts_redis_and_gateway() -> None:
    first = children(router(SMALLEST), SETTINGS, "a")
    second = children(router(SMALLEST), SETTINGS, "b")
    changed = [one["metadata"]["name"] for one, other in zip(first, second, strict=True) if one != other]
    assert changed == ["qwen-redis", "qwen-gateway"]


def test_secret_contains_password_configuration_and_url() -> None:
    assert redis_entries("serving", "qwen", "pass") == {
        "qwen-redis.password": "pass",
        "qwen-redis.auth.conf": "requirepass pass\n",
        "qwen-redis.url": "redis://:pass@qwen-redis.serving.svc:6379/0",
    }


def test_read_write_once_cache_is_an_ephemeral_volume_of_each_pod() -> None:
    cache = {"size": "50Gi", "accessMode": "ReadWriteOnce"}
    made = children(router({**SMALLEST, "model": {"name": "m", "cache": cache}}), SETTINGS, "")
    assert not [one for one in made if one["kind"] == "PersistentVolumeClaim"]
    (engine,) = [
        one for one in made if one["metadata"]["name"] == "qwen-greedy" and one["kind"] == "Deployment"
    ]
    assert engine["spec"]["template"]["spec"]["volumes"][0] == {
        "name": "models",
        "ephemeral": {
            "volumeClaimTemplate": {
                "spec": {
                    "accessModes": ["ReadWriteOnce"],
                    "resources": {"requests": {"storage": "50Gi"}},
                }
            }
        },
    }


def test_downloaded_models_are_limited_by_the_limit_of_ephemeral_storage() -> None:
    resources = {"limits": {"ephemeral-storage": "200Gi"}}
    made = engine_deployment(smallest(greedy={"resources": resources}), "greedy", SETTINGS)
    pod = made["spec"]["template"]["spec"]
    assert pod["volumes"][0] == {"name": "models", "emptyDir": {"sizeLimit": "200Gi"}}
    assert pod["containers"][0]["resources"]["limits"]["ephemeral-storage"] == "200Gi"


ADAPTER = {"name": "sql", "path": "org/sql"}
MODELS_ON_DISK: dict[str, tuple[dict[str, Any], PoolName, Manifest]] = {
    # Twice the 16-bit weights of the models that a pool loads, and 32 GiB.
    "target": ({}, "greedy", {"sizeLimit": "61Gi"}),
    "target and draft": ({}, "speculative", {"sizeLimit": "67Gi"}),
    "split across GPUs": ({"engine": {"tensorParallel": 4}}, "greedy", {"sizeLimit": "61Gi"}),
    "unknown model": ({"model": {"name": "org/model"}}, "greedy", {}),
    "adapters": ({"model": {**SMALLEST["model"], "adapters": [ADAPTER]}}, "greedy", {}),
}


@pytest.mark.parametrize(("spec", "pool", "empty_dir"), MODELS_ON_DISK.values(), ids=MODELS_ON_DISK)
def test_downloaded_models_of_known_size_are_limited(
    spec: dict[str, Any], pool: PoolName, empty_dir: Manifest
) -> None:
    made = engine_deployment(router({**SMALLEST, **spec}), pool, SETTINGS)
    volumes = made["spec"]["template"]["spec"]["volumes"]
    assert volumes[0] == {"name": "models", "emptyDir": empty_dir}


def test_unknown_draft_model_leaves_the_volume_of_its_pool_without_a_limit() -> None:
    speculation = {"algorithm": "Standalone", "draftModel": "org/draft"}
    spec = router({**SMALLEST, "pools": {"speculative": {"speculation": speculation}}})
    limits = [
        engine_deployment(spec, pool, SETTINGS)["spec"]["template"]["spec"]["volumes"][0]["emptyDir"]
        for pool in POOLS
    ]
    assert limits == [{}, {"sizeLimit": "61Gi"}]


URLS: dict[str, tuple[dict[str, Any], str]] = {
    "Service": ({}, "http://qwen-gateway.serving.svc:8000"),
    "HTTPRoute": (
        {"httpRoute": {"parentRefs": [{"name": "edge"}], "hostnames": ["a.example.com", "b.example.com"]}},
        "http://a.example.com",
    ),
    "HTTPRoute at a listener with TLS": (
        {
            "httpRoute": {
                "parentRefs": [{"name": "edge", "sectionName": "https"}],
                "hostnames": ["a.example.com"],
            }
        },
        "https://a.example.com",
    ),
    "HTTPRoute for all host names": (
        {"httpRoute": {"parentRefs": [{"name": "edge"}]}},
        "http://qwen-gateway.serving.svc:8000",
    ),
    "Ingress": ({"ingress": {"host": "a.example.com", "tlsSecretName": "tls"}}, "https://a.example.com"),
}


@pytest.mark.parametrize(("gateway", "url"), URLS.values(), ids=URLS.keys())
def test_url_is_that_of_the_ingress_or_the_route(gateway: dict[str, Any], url: str) -> None:
    assert base_url(router({**SMALLEST, "gateway": gateway})) == url


def test_request_timeout_of_the_route_can_be_set() -> None:
    route = {"parentRefs": [{"name": "edge"}], "requestTimeout": "10m"}
    (made,) = http_route(router({**SMALLEST, "gateway": {"httpRoute": route}}))
    assert made["spec"]["rules"][0]["timeouts"] == {"request": "10m"}


def test_route_has_the_filters_and_weights_of_the_spec() -> None:
    filters = [{"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["x-debug"]}}]
    other = {"name": "other-gateway", "namespace": "next", "port": 80, "weight": 10}
    route = {"parentRefs": [{"name": "edge"}], "filters": filters, "weight": 90, "backendRefs": [other]}
    (made,) = http_route(router({**SMALLEST, "gateway": {"httpRoute": route}}))
    assert made["spec"]["rules"] == [
        {
            "filters": filters,
            "backendRefs": [{"name": "qwen-gateway", "port": 8000, "weight": 90}, other],
            "timeouts": {"request": "0s"},
        }
    ]


def test_gateway_mounts_the_cache_volume_of_a_local_model() -> None:
    model = {"name": "/models/qwen", "cache": {"existingClaim": "weights"}}
    spec = gateway_template({**SMALLEST, "model": model})["spec"]
    assert spec["volumes"][-1] == {
        "name": "models",
        "persistentVolumeClaim": {"claimName": "weights", "readOnly": True},
    }
    assert spec["containers"][0]["volumeMounts"][-1] == {
        "name": "models",
        "mountPath": "/models",
        "readOnly": True,
    }


def test_all_pods_have_the_operators_pull_secrets_in_addition_to_those_of_the_spec() -> None:
    template = {"spec": {"imagePullSecrets": [{"name": "mine"}]}}
    spec = smallest(greedy={"podTemplate": template})
    made = children(spec, replace(SETTINGS, pull_secrets=("mirror",)), "")
    assert {
        one["metadata"]["name"]: [
            item["name"] for item in one["spec"]["template"]["spec"]["imagePullSecrets"]
        ]
        for one in made
        if one["kind"] in ("Deployment", "StatefulSet")
    } == {
        "qwen-redis": ["mirror"],
        "qwen-speculative": ["mirror"],
        "qwen-greedy": ["mirror", "mine"],
        "qwen-gateway": ["mirror"],
    }


def test_replicas_are_unset_with_an_autoscaler() -> None:
    scaled = smallest(greedy={"autoscaling": {"maxReplicas": 4}})
    assert "replicas" not in engine_deployment(scaled, "greedy", SETTINGS)["spec"]
    assert engine_deployment(scaled, "speculative", SETTINGS)["spec"]["replicas"] == 1


def test_replicas_are_unset_with_external_scaling() -> None:
    made = children(
        router({**SMALLEST, "pools": {**SMALLEST["pools"], "greedy": {"scaling": "External"}}}), SETTINGS, ""
    )
    named = {(one["kind"], one["metadata"]["name"]): one for one in made}
    assert "replicas" not in named["Deployment", "qwen-greedy"]["spec"]
    assert ("PodDisruptionBudget", "qwen-greedy") in named
    assert not [kind for kind, _ in named if kind == "HorizontalPodAutoscaler"]


STRATEGIES: dict[str, tuple[dict[str, Any], Manifest]] = {
    "default": ({}, {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}),
    "no surge": (
        {"maxSurge": 0, "maxUnavailable": 1},
        {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}},
    ),
    "percentages": (
        {"maxSurge": "50%", "maxUnavailable": "25%"},
        {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "50%"}},
    ),
    "recreate": ({"type": "Recreate"}, {"type": "Recreate"}),
}


@pytest.mark.parametrize(("strategy", "wanted"), STRATEGIES.values(), ids=STRATEGIES.keys())
def test_strategy_of_a_pool_is_that_of_its_deployment(strategy: dict[str, Any], wanted: Manifest) -> None:
    made = smallest(greedy={"strategy": strategy})
    assert engine_deployment(made, "greedy", SETTINGS)["spec"]["strategy"] == wanted


@pytest.mark.parametrize("value", [-1, "half", "25", 1.5])
def test_neither_number_nor_percentage_of_pods_is_refused(value: Any) -> None:
    with pytest.raises(SpecError, match=r"^spec\.pools\.greedy\.strategy\.maxSurge: "):
        smallest(greedy={"strategy": {"maxSurge": value}})


LOAD_SECONDS: dict[str, tuple[dict[str, Any], int]] = {
    "as the runtime states": ({}, 1800),
    "a longer time": ({"failureThreshold": 540}, 5400),
    "a longer period": ({"periodSeconds": 30}, 5400),
    "a time that the API server refuses": ({"failureThreshold": "many"}, 1800),
}


@pytest.mark.parametrize(("probe", "seconds"), LOAD_SECONDS.values(), ids=LOAD_SECONDS.keys())
def test_progress_deadline_of_a_pool_exceeds_the_time_that_its_engines_may_take_to_load(
    probe: dict[str, Any], seconds: int
) -> None:
    template = {"spec": {"containers": [{"name": "engine", "startupProbe": probe}]}}
    made = engine_deployment(smallest(greedy={"podTemplate": template}), "greedy", SETTINGS)
    assert made["spec"]["progressDeadlineSeconds"] == seconds + 600


def test_pool_whose_engines_may_load_forever_has_no_progress_deadline() -> None:
    forever = {"name": "engine", "startupProbe": {"failureThreshold": 2**31 - 1}}
    made = smallest(greedy={"podTemplate": {"spec": {"containers": [forever]}}})
    deadline = engine_deployment(made, "greedy", SETTINGS)["spec"]["progressDeadlineSeconds"]
    assert deadline == 2**31 - 1, "the number with which Kubernetes applies no deadline"


def test_node_pool_does_not_affect_gateway_and_redis() -> None:
    for one in children(router(EVERYTHING), SETTINGS, ""):
        if one["metadata"]["name"] in ("qwen-gateway", "qwen-redis") and "template" in one.get("spec", {}):
            pod = one["spec"]["template"]["spec"]
            assert not {"affinity", "nodeSelector", "tolerations"} & set(pod)
