"""The children of a DPSRouter, compared with golden files (see dps_testkit.operator.golden)."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from dps_engines.pools import PoolName
from dps_gateway.config import GatewayConfig, Timeouts
from dps_gateway.runtime import FIXED_SECTIONS
from dps_operator.build import children
from dps_operator.build.engine import engine_deployment
from dps_operator.build.gateway import (
    DRAIN_DELAY_SECONDS,
    READ_AT_START,
    gateway_config,
    gateway_config_map,
    gateway_deployment,
)
from dps_operator.build.network import base_url
from dps_operator.errors import SpecError
from dps_operator.objects import CHILDREN, Manifest, kind_of
from dps_testkit.operator.golden import CASES, HERE
from dps_testkit.operator.routers import (
    EVERYTHING,
    MOONCAKE,
    PREFIX_CACHE,
    SETTINGS,
    SMALLEST,
    SOURCES,
    SOURCES_VLLM,
    VLLM,
    router,
    smallest,
)
from tests.operator.objects import engine_pod, gateway_pod

SPECS = [SMALLEST, EVERYTHING, PREFIX_CACHE, MOONCAKE, VLLM, SOURCES, SOURCES_VLLM]


@pytest.mark.parametrize("case", CASES)
def test_children_match_the_golden_file(case: str) -> None:
    wanted = list(yaml.safe_load_all((HERE / f"{case}.yaml").read_text()))
    assert children(router(CASES[case]), SETTINGS, "secret-uid") == wanted


@pytest.mark.parametrize("spec", SPECS)
def test_every_child_has_an_owner_a_label_and_a_watched_kind(spec: dict[str, Any]) -> None:
    made = children(router(spec), SETTINGS, "secret-uid")
    assert len({(one["kind"], one["metadata"]["name"]) for one in made}) == len(made)
    for one in made:
        assert kind_of(one) in CHILDREN
        assert one["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
        assert one["metadata"]["labels"]["dpsrouter.io/router"] == "qwen"


SECRET = {"name": "s", "key": "k"}
SECURED = {
    **VLLM,
    "gateway": {"auth": {"secretName": "keys"}, "tls": {"secretName": "tls"}},
    "engine": {**VLLM["engine"], "apiKeySecretRef": SECRET},
    "sessionStore": {"urlSecretRef": SECRET, "caSecretRef": SECRET},
}


@pytest.mark.parametrize("spec", [*SPECS, SECURED])
def test_containers_mount_each_volume_of_their_pod_and_no_other(spec: dict[str, Any]) -> None:
    for one in children(router(spec), SETTINGS, ""):
        if one["kind"] == "Deployment":
            pod = one["spec"]["template"]["spec"]
            containers = [*pod.get("initContainers", []), *pod["containers"]]
            mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts", [])}
            assert mounted == {volume["name"] for volume in pod.get("volumes", [])}


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


def test_options_of_the_spec_are_passed_to_the_gateway() -> None:
    gateway = {
        "limits": {"maxInFlightPerReplica": 48, "maxQueued": 0},
        "timeouts": {"queueSeconds": 2.5, "drainDelaySeconds": 10.5},
        "drainSeconds": 60,
        "retries": {"continueStreams": False},
        "modelAliases": ["gpt-4o"],
        "strictModel": False,
        "volatilePrompt": ["^x"],
    }
    store = {"timeoutSeconds": 1.5}
    spec = {**SMALLEST, "gateway": gateway, "routing": {"minAcceptance": 1.5}, "sessionStore": store}
    config = gateway_config(router(spec))
    assert config["limits"] == {"maxInFlightPerReplica": 48, "maxQueued": 0}
    assert config["timeouts"] == {"drainSeconds": 60, "queueSeconds": 2.5, "drainDelaySeconds": 10.5}
    assert (config["retries"], config["routing"]["minAcceptance"]) == ({"continueStreams": False}, 1.5)
    name = SMALLEST["model"]["name"]
    names = {"name": name, "tokenizer": name, "aliases": {"gpt-4o": name}, "strict": False}
    assert config["model"] == names | {"volatilePrompt": ["^x"]}
    assert config["session"]["redisTimeoutSeconds"] == 1.5
    GatewayConfig.model_validate(config)
    assert gateway_pod(spec)["terminationGracePeriodSeconds"] == 11 + 60 + 25


def test_grace_period_covers_the_gateways_default_delay() -> None:
    assert Timeouts().drain_delay_seconds == DRAIN_DELAY_SECONDS


@pytest.mark.parametrize("spec", SPECS)
def test_gateway_accepts_the_generated_configuration(spec: dict[str, Any]) -> None:
    GatewayConfig.model_validate(gateway_config(router(spec)))


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
        {"telemetry": {"traceUrl": "https://tracing.example/{trace}"}},
        {"sessionStore": {"timeoutSeconds": 1.0}},
        {"sessionStore": {"mirrorRecords": 1000}},
        {"routing": {"calibration": {}}},
    ],
    ids=str,
)
def test_change_of_a_setting_that_is_read_at_start_changes_the_pod_template(change: dict[str, Any]) -> None:
    assert gateway_template({**SMALLEST, **change}) != gateway_template(SMALLEST)


def test_new_password_restarts_redis_and_gateway() -> None:
    first = children(router(SMALLEST), SETTINGS, "a")
    second = children(router(SMALLEST), SETTINGS, "b")
    changed = [one["metadata"]["name"] for one, other in zip(first, second, strict=True) if one != other]
    assert changed == ["qwen-redis", "qwen-gateway"]


ADAPTER = {"name": "sql", "path": "org/sql"}
MODELS_ON_DISK: dict[str, tuple[dict[str, Any], PoolName, Manifest]] = {
    # Twice the 16-bit weights of the models that a pool loads, and 32 GiB.
    "target": ({}, "greedy", {"sizeLimit": "61Gi"}),
    "target and draft": ({}, "speculative", {"sizeLimit": "67Gi"}),
    "unknown model": ({"model": {"name": "org/model"}}, "greedy", {}),
    "adapters": ({"model": {**SMALLEST["model"], "adapters": [ADAPTER]}}, "greedy", {}),
    "limit of ephemeral storage": (
        {"pools": {**SMALLEST["pools"], "greedy": {"resources": {"limits": {"ephemeral-storage": "200Gi"}}}}},
        "greedy",
        {"sizeLimit": "200Gi"},
    ),
}


@pytest.mark.parametrize(("spec", "pool", "empty_dir"), MODELS_ON_DISK.values(), ids=MODELS_ON_DISK)
def test_downloaded_models_of_known_size_are_limited(
    spec: dict[str, Any], pool: PoolName, empty_dir: Manifest
) -> None:
    pod = engine_pod({**SMALLEST, **spec}, pool)
    assert pod["volumes"][0] == {"name": "models", "emptyDir": empty_dir}


URLS: dict[str, tuple[dict[str, Any], str]] = {
    "Service": ({}, "http://qwen-gateway.serving.svc:8000"),
    "Service with TLS": ({"tls": {"secretName": "tls"}}, "https://qwen-gateway.serving.svc:8000"),
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
    "Ingress": ({"ingress": {"host": "a.example.com", "tlsSecretName": "tls"}}, "https://a.example.com"),
    "Ingress to a gateway with TLS": (
        {"ingress": {"host": "a.example.com", "tlsSecretName": "tls"}, "tls": {"secretName": "tls"}},
        "https://a.example.com",
    ),
}


@pytest.mark.parametrize(("gateway", "url"), URLS.values(), ids=URLS.keys())
def test_url_is_that_of_the_ingress_or_the_route(gateway: dict[str, Any], url: str) -> None:
    assert base_url(router({**SMALLEST, "gateway": gateway})) == url


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


DEADLINES: dict[str, tuple[dict[str, Any], int]] = {
    "as the runtime states": ({}, 1800 + 600),
    "a longer time": ({"failureThreshold": 540}, 5400 + 600),
    "a longer period": ({"periodSeconds": 30}, 5400 + 600),
    # With this number, Kubernetes applies no deadline.
    "forever": ({"failureThreshold": 2**31 - 1}, 2**31 - 1),
}


@pytest.mark.parametrize(("probe", "seconds"), DEADLINES.values(), ids=DEADLINES.keys())
def test_progress_deadline_of_a_pool_exceeds_the_time_that_its_engines_may_take_to_load(
    probe: dict[str, Any], seconds: int
) -> None:
    template = {"spec": {"containers": [{"name": "engine", "startupProbe": probe}]}}
    made = engine_deployment(smallest(greedy={"podTemplate": template}), "greedy", SETTINGS)
    assert made["spec"]["progressDeadlineSeconds"] == seconds
