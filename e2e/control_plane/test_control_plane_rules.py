"""Every rule of the CRD on a real API server: what breaks it is refused with a message that helps."""

from typing import Any

import pytest

from dps_testkit.cluster.kube import Kube
from dps_testkit.errors import RefusedError
from dps_tools.crd import crd
from e2e.cluster.routers import GONE, router, speculation

pytest_plugins = ["e2e.cluster.fixtures"]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a draft model is missing": (
        speculation(algorithm="Eagle"),
        "Standalone, Eagle and Eagle3 require speculation.draftModel; set it, or choose Ngram",
    ),
    "a draft model for n-grams": (
        speculation(algorithm="Ngram", draftModel="m"),
        "Ngram drafts from the prompt and needs no draft model; remove speculation.draftModel",
    ),
    "steps for n-grams": (
        speculation(algorithm="Ngram", steps=3),
        "Ngram does not use draft steps or top-k; remove speculation.steps and speculation.topK",
    ),
    "a chain of the wrong length": (
        speculation(algorithm="Standalone", draftModel="m", steps=3, draftTokens=8),
        "with topK 1 speculation.draftTokens must be steps + 1; change or remove it",
    ),
    "more draft tokens than the tree has": (
        speculation(algorithm="Eagle", draftModel="m", steps=2, topK=2, draftTokens=8),
        "the draft tree has at most 1 + topK + (steps - 1) * topK^2 tokens",
    ),
    "replicas and autoscaling of a pool": (
        {"pools": {"greedy": {"replicas": 2, "autoscaling": {"maxReplicas": 3}}}},
        "set either replicas or autoscaling, not both",
    ),
    "replicas and autoscaling of the speculative pool": (
        {"pools": {"speculative": {"replicas": 2, "autoscaling": {"maxReplicas": 3}}}},
        "set either replicas or autoscaling, not both",
    ),
    "replicas and autoscaling of the gateway": (
        {"gateway": {"replicas": 2, "autoscaling": {"maxReplicas": 3}}},
        "set either replicas or autoscaling, not both",
    ),
    "a pool's minimum above its maximum": (
        {"pools": {"greedy": {"autoscaling": {"minReplicas": 4, "maxReplicas": 3}}}},
        "autoscaling.minReplicas must not exceed autoscaling.maxReplicas",
    ),
    "the gateway's default minimum above its maximum": (
        {"gateway": {"autoscaling": {"maxReplicas": 1}}},
        "autoscaling.minReplicas must not exceed autoscaling.maxReplicas",
    ),
    "two session stores": (
        {"sessionStore": {"managed": {}, "urlSecretRef": {"name": "redis", "key": "url"}}},
        "set either sessionStore.managed or sessionStore.urlSecretRef, not both",
    ),
    "a cache of two kinds": (
        {"model": {"cache": {"size": "1Gi", "existingClaim": "models"}}},
        "set either cache.size, for a volume that the operator creates, or cache.existingClaim, not both",
    ),
    "a cache of no kind": (
        {"model": {"cache": {}}},
        "set either cache.size, for a volume that the operator creates, or cache.existingClaim, not both",
    ),
    "a class for an existing claim": (
        {"model": {"cache": {"existingClaim": "models", "storageClassName": "fast"}}},
        "cache.storageClassName requires cache.size; an existing claim already has a storage class",
    ),
    "no replica": ({"pools": {"greedy": {"replicas": 0}}}, "should be greater than or equal to 1"),
    "an unknown policy": ({"routing": {"policy": "Fastest"}}, "Unsupported value"),
    "a negative threshold": ({"routing": {"thresholdTokens": -1}}, "should be greater than or equal to 0"),
    "a session key of no kind": ({"routing": {"sessionKeys": ["cookie:id"]}}, "should match"),
    "a credential as a session key": (
        {"routing": {"sessionKeys": ["header:x-session-id", "header:Authorization"]}},
        "a credential is shared by many sessions and cannot identify one",
    ),
    "a sampling ratio above 1": ({"telemetry": {"sampleRatio": 2}}, "should be less than or equal to 1"),
    "an endpoint without a scheme": ({"telemetry": {"otlpEndpoint": "collector:4317"}}, "should match"),
    "no speculation": ({"pools": {"speculative": {"speculation": GONE}}}, "Required value"),
    "no model": ({"model": GONE}, "Required value"),
    "a size that is none": ({"sessionStore": {"managed": {"size": "big"}}}, "should match"),
    "an unknown field": ({"routing": {"treshold": 1}}, "unknown field"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_an_object_that_breaks_a_rule_is_refused(kube: Kube, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError) as refused:
        kube.apply(router(**change), dry_run=True)
    assert message in str(refused.value)


ACCEPTED: dict[str, dict[str, Any]] = {
    "the smallest": {},
    "n-grams": speculation(algorithm="Ngram", draftTokens=8),
    "a tree": speculation(algorithm="Eagle3", draftModel="m", steps=3, topK=4, draftTokens=16),
    "no bound": {"routing": {"thresholdTokens": None}},
    "a whole number as a size": {"sessionStore": {"managed": {"size": 1073741824}}},
    "numbers as resources": {"pools": {"greedy": {"resources": {"requests": {"cpu": 4, "memory": "8Gi"}}}}},
    "a ratio": {"telemetry": {"sampleRatio": 0.05, "otlpEndpoint": "http://collector:4317"}},
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_a_good_object_is_taken(kube: Kube, change: dict[str, Any]) -> None:
    kube.apply(router(**change), dry_run=True)


UNCHANGEABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "the class of the cache": (
        {"model": {"cache": {"size": "10Gi", "storageClassName": "slow"}}},
        {"model": {"cache": {"size": "10Gi", "storageClassName": "fast"}}},
        "cache.storageClassName cannot be changed",
    ),
    "a class for a cache that has none": (
        {"model": {"cache": {"size": "10Gi"}}},
        {"model": {"cache": {"size": "10Gi", "storageClassName": "fast"}}},
        "cache.storageClassName cannot be changed",
    ),
    "the access mode of the cache": (
        {"model": {"cache": {"size": "10Gi"}}},
        {"model": {"cache": {"size": "10Gi", "accessMode": "ReadWriteOnce"}}},
        "cache.accessMode cannot be changed",
    ),
    "a smaller cache": (
        {"model": {"cache": {"size": "10Gi"}}},
        {"model": {"cache": {"size": "9Gi"}}},
        "cache.size can only grow",
    ),
    "the size of the managed store": (
        {"sessionStore": {"managed": {"size": "1Gi"}}},
        {"sessionStore": {"managed": {"size": "2Gi"}}},
        "sessionStore.managed.size cannot be changed",
    ),
    "the class of the managed store": (
        {"sessionStore": {"managed": {}}},
        {"sessionStore": {"managed": {"storageClassName": "fast"}}},
        "sessionStore.managed.storageClassName cannot be changed",
    ),
}


@pytest.mark.parametrize(("before", "after", "message"), UNCHANGEABLE.values(), ids=UNCHANGEABLE.keys())
def test_what_cannot_be_changed_is_refused(
    kube: Kube, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    kube.apply(router(**before))
    with pytest.raises(RefusedError) as refused:
        kube.apply(router(**after), dry_run=True)
    assert message in str(refused.value)


def test_a_larger_cache_is_taken(kube: Kube) -> None:
    kube.apply(router(model={"cache": {"size": "900Mi"}}))
    kube.apply(router(model={"cache": {"size": "1Gi"}}))


def test_a_field_left_out_stays_unset_so_that_its_alternative_can_be_set_later(kube: Kube) -> None:
    kube.apply(router())
    kube.apply(router(gateway={"autoscaling": {"maxReplicas": 5}}))


NAMES = {
    "q" * 51: "metadata.name must have at most 50 characters",
    "7b": "metadata.name must start with a letter",
    "qwen.7b": "metadata.name must start with a letter",
}


@pytest.mark.parametrize(("name", "message"), NAMES.items())
def test_a_name_that_the_children_could_not_carry_is_refused(kube: Kube, name: str, message: str) -> None:
    with pytest.raises(RefusedError) as refused:
        kube.apply(router(name), dry_run=True)
    assert message in str(refused.value)


def rules(schema: Any) -> list[str]:
    """The messages of every rule in a schema."""
    if isinstance(schema, list):
        return [message for part in schema for message in rules(part)]
    if not isinstance(schema, dict):
        return []
    own = [rule["message"] for rule in schema.get("x-kubernetes-validations", [])]
    return own + [message for part in schema.values() for message in rules(part)]


def test_every_rule_is_broken_here() -> None:
    tried = [message for _, message in REFUSED.values()]
    tried += [message for _, _, message in UNCHANGEABLE.values()]
    tried += NAMES.values()
    found = rules(crd())
    assert len(found) > 15
    assert [rule for rule in found if not any(one in rule for one in tried)] == []


def test_defaults_stand_in_the_stored_object(kube: Kube) -> None:
    kube.apply(router(routing={"thresholdTokens": None}), server_side=True)
    spec = kube.get("dpsrouter", "qwen")["spec"]
    assert spec["routing"] == {
        "policy": "DeltaPrefill",
        "sessionKeys": [],
        "sessionTTLSeconds": 3600,
        "thresholdTokens": None,
    }
    assert spec["nodePool"]["profile"] == "A100-80GB"


def test_the_gateway_can_be_scaled_and_is_found_by_its_category(kube: Kube) -> None:
    kube.apply(router(gateway={"replicas": 2}))
    kube.kubectl("scale", "dps/qwen", "--replicas", "3")
    assert "qwen" in kube.kubectl("get", "inference")
    assert kube.get("dpsrouter", "qwen")["spec"]["gateway"]["replicas"] == 3
