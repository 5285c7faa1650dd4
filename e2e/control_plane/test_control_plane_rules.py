"""Every validation rule of the CRD on a real API server: a violation is rejected with a helpful message."""

from typing import Any

import pytest

from dps_testkit.cluster.kube import Kube
from dps_testkit.errors import RefusedError
from dps_tools.crd import crd
from e2e.cluster.routers import REMOVED, router, speculation

pytest_plugins = ["e2e.cluster.fixtures"]

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing draft model": (
        speculation(algorithm="Eagle"),
        "Standalone, Eagle and Eagle3 require speculation.draftModel; set it, or choose Ngram or Suffix",
    ),
    "draft model with Ngram": (
        speculation(algorithm="Ngram", draftModel="m"),
        "speculation.draftModel must not be set with algorithms Ngram and Suffix, which use no draft model",
    ),
    "draft model with Suffix": (
        speculation(algorithm="Suffix", draftModel="m"),
        "speculation.draftModel must not be set with algorithms Ngram and Suffix, which use no draft model",
    ),
    "steps with Ngram": (
        speculation(algorithm="Ngram", steps=3),
        "speculation.steps and speculation.topK must not be set with algorithms Ngram and Suffix",
    ),
    "draftTokens do not match steps": (
        speculation(algorithm="Standalone", draftModel="m", steps=3, draftTokens=8),
        "speculation.draftTokens must be steps + 1 if topK is 1; change or remove speculation.draftTokens",
    ),
    "more draftTokens than the draft tree has": (
        speculation(algorithm="Eagle", draftModel="m", steps=2, topK=2, draftTokens=8),
        "speculation.draftTokens must not exceed the size of the draft tree, 1 + topK + (steps - 1) * topK^2",
    ),
    "replicas and autoscaling of the greedy pool": (
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
    "replicas with external scaling": (
        {"pools": {"greedy": {"scaling": "External", "replicas": 2}}},
        "replicas and autoscaling must not be set with scaling External",
    ),
    "replicas with a GPU budget": (
        {"gpuBudget": {"gpus": 2}, "pools": {"greedy": {"replicas": 2}}},
        "replicas, autoscaling and scaling External must not be set in a pool with gpuBudget",
    ),
    "autoscaling with a GPU budget": (
        {"gpuBudget": {"gpus": 2}, "pools": {"speculative": {"autoscaling": {"maxReplicas": 2}}}},
        "replicas, autoscaling and scaling External must not be set in a pool with gpuBudget",
    ),
    "external scaling with a GPU budget": (
        {"gpuBudget": {"gpus": 2}, "pools": {"greedy": {"scaling": "External"}}},
        "replicas, autoscaling and scaling External must not be set in a pool with gpuBudget",
    ),
    "GPU budget for less than two replicas": (
        {"gpuBudget": {"gpus": 3}, "engine": {"tensorParallel": 2}},
        "gpuBudget.gpus must be at least 2 * engine.tensorParallel",
    ),
    "two replicas on a shared GPU": (
        {"placement": "SharedGPU", "pools": {"greedy": {"replicas": 2}}},
        "with placement SharedGPU each pool has one replica on one GPU",
    ),
    "tensor parallelism on a shared GPU": (
        {"placement": "SharedGPU", "engine": {"tensorParallel": 2}},
        "with placement SharedGPU each pool has one replica on one GPU",
    ),
    "surge with Recreate": (
        {"pools": {"greedy": {"strategy": {"type": "Recreate", "maxSurge": 1}}}},
        "strategy.maxSurge and strategy.maxUnavailable must not be set with type Recreate",
    ),
    "neither surge nor unavailable replicas": (
        {"pools": {"speculative": {"strategy": {"maxSurge": "0%", "maxUnavailable": 0}}}},
        "strategy.maxUnavailable must be greater than 0 if strategy.maxSurge is 0",
    ),
    "no surge with the default of maxUnavailable": (
        {"pools": {"greedy": {"strategy": {"maxSurge": 0}}}},
        "strategy.maxUnavailable must be greater than 0 if strategy.maxSurge is 0",
    ),
    "negative surge": (
        {"pools": {"greedy": {"strategy": {"maxSurge": -1}}}},
        "should be greater than or equal to 0",
    ),
    "surge that is not a percentage": (
        {"pools": {"greedy": {"strategy": {"maxSurge": "two"}}}},
        "should match",
    ),
    "minReplicas above maxReplicas": (
        {"pools": {"greedy": {"autoscaling": {"minReplicas": 4, "maxReplicas": 3}}}},
        "autoscaling.minReplicas must not exceed autoscaling.maxReplicas",
    ),
    "default minReplicas of the gateway above maxReplicas": (
        {"gateway": {"autoscaling": {"maxReplicas": 1}}},
        "autoscaling.minReplicas must not exceed autoscaling.maxReplicas",
    ),
    "two session stores": (
        {"sessionStore": {"managed": {}, "urlSecretRef": {"name": "redis", "key": "url"}}},
        "set either sessionStore.managed or sessionStore.urlSecretRef, not both",
    ),
    "authorities of a managed store": (
        {"sessionStore": {"caSecretRef": {"name": "ca", "key": "ca.crt"}}},
        "sessionStore.caSecretRef requires sessionStore.urlSecretRef",
    ),
    "cache with size and existing claim": (
        {"model": {"cache": {"size": "1Gi", "existingClaim": "models"}}},
        "set either cache.size, for a volume that the operator creates, or cache.existingClaim, not both",
    ),
    "empty cache": (
        {"model": {"cache": {}}},
        "set either cache.size, for a volume that the operator creates, or cache.existingClaim, not both",
    ),
    "storage class of an existing claim": (
        {"model": {"cache": {"existingClaim": "models", "storageClassName": "fast"}}},
        "cache.storageClassName requires cache.size; an existing claim already has a storage class",
    ),
    "revision of a model in a bucket": (
        {"model": {"revision": "v2", "source": {"s3": {"uri": "s3://models/qwen"}}}},
        "model.revision must not be set with model.source",
    ),
    "two sources of the model": (
        {"model": {"source": {"pvc": {"claimName": "w"}, "oci": {"image": "i"}}}},
        "set exactly one of source.pvc, source.s3, source.gs and source.oci",
    ),
    "empty source of the draft": (
        speculation(algorithm="Eagle", draftModel="m", draftSource={}),
        "set exactly one of source.pvc, source.s3, source.gs and source.oci",
    ),
    "source of the draft with Ngram": (
        speculation(algorithm="Ngram", draftSource={"pvc": {"claimName": "w"}}),
        "speculation.draftSource must not be set with algorithms Ngram and Suffix, which use no draft model",
    ),
    "path above the volume": (
        {"model": {"source": {"pvc": {"claimName": "w", "path": "a/../.."}}}},
        "source.path must not contain '..'",
    ),
    "absolute path in an image": (
        {"model": {"source": {"oci": {"image": "i", "path": "/m"}}}},
        "should match",
    ),
    "folder above the bucket": (
        {"model": {"source": {"gs": {"uri": "gs://models/../other"}}}},
        "source.uri must not contain '..'",
    ),
    "URI of another kind of storage": (
        {"model": {"source": {"s3": {"uri": "gs://models/qwen"}}}},
        "should match",
    ),
    "two identities for a bucket": (
        {
            "model": {
                "source": {
                    "s3": {
                        "uri": "s3://models/qwen",
                        "credentialsSecretRef": {"name": "s"},
                        "serviceAccountName": "a",
                    }
                }
            }
        },
        "set either source.credentialsSecretRef or source.serviceAccountName, not both",
    ),
    "two volumes for the engines' cache": (
        {"engine": {"cache": {"emptyDir": {}, "existingClaim": "c"}}},
        "set exactly one of cache.hostPath, cache.existingClaim, cache.claim and cache.emptyDir",
    ),
    "common prefix cache without a directory": (
        {"prefixCache": {"mode": "Common", "size": "1Gi"}},
        "mode Common with backend File requires prefixCache.file and prefixCache.size",
    ),
    "common prefix cache without a size": (
        {"prefixCache": {"mode": "Common", "file": {"hostPath": "/mnt/kv"}}},
        "mode Common with backend File requires prefixCache.file and prefixCache.size",
    ),
    "prefix cache of size 0": (
        {"prefixCache": {"size": 0}},
        "prefixCache.size must be greater than 0",
    ),
    "prefix cache larger than its claim": (
        {"prefixCache": {"size": "2Gi", "file": {"claim": {"size": "1Gi"}}}},
        "prefixCache.size must not exceed prefixCache.file.claim.size",
    ),
    "prefix cache in two directories": (
        {"prefixCache": {"file": {"hostPath": "/mnt/kv", "existingClaim": "kv"}}},
        "set exactly one of file.hostPath, file.existingClaim and file.claim",
    ),
    "prefix cache without a directory in file": (
        {"prefixCache": {"file": {}}},
        "set exactly one of file.hostPath, file.existingClaim and file.claim",
    ),
    "prefix cache in a relative directory": (
        {"prefixCache": {"file": {"hostPath": "mnt/kv"}}},
        "should match",
    ),
    "unknown backend of the prefix cache": ({"prefixCache": {"backend": "NFS"}}, "Unsupported value"),
    "Mooncake without settings": (
        {"prefixCache": {"mode": "Common", "backend": "Mooncake"}},
        "mode Common with backend Mooncake requires prefixCache.mooncake",
    ),
    "Mooncake in a directory": (
        {"prefixCache": {"backend": "Mooncake", "file": {"hostPath": "/mnt/kv"}}},
        "prefixCache.file and prefixCache.size require backend File",
    ),
    "Mooncake's settings for another backend": (
        {"prefixCache": {"mooncake": {"segmentSize": "1Gi"}}},
        "prefixCache.mooncake requires backend Mooncake",
    ),
    "Mooncake without a segment size": (
        {"prefixCache": {"backend": "Mooncake", "mooncake": {}}},
        "Required value",
    ),
    "Mooncake segments of size 0": (
        {"prefixCache": {"backend": "Mooncake", "mooncake": {"segmentSize": 0}}},
        "mooncake.segmentSize must be greater than 0",
    ),
    "two Mooncake masters": (
        {
            "prefixCache": {
                "backend": "Mooncake",
                "mooncake": {"segmentSize": "1Gi", "master": {}, "externalMaster": "m:50051"},
            }
        },
        "set either mooncake.master or mooncake.externalMaster, not both",
    ),
    "Mooncake master without a port": (
        {"prefixCache": {"backend": "Mooncake", "mooncake": {"segmentSize": "1Gi", "externalMaster": "m"}}},
        "should match",
    ),
    "RDMA devices over TCP": (
        {"prefixCache": {"backend": "Mooncake", "mooncake": {"segmentSize": "1Gi", "devices": ["mlx5_0"]}}},
        "mooncake.devices requires protocol RDMA",
    ),
    "timeout of zero": (
        {"gateway": {"timeouts": {"queueSeconds": 0}}},
        "timeouts.silentSeconds and timeouts.healthIntervalSeconds must be greater than 0",
    ),
    "no requests in flight": (
        {"gateway": {"limits": {"maxInFlightPerReplica": 0}}},
        "should be greater than or equal to 1",
    ),
    "zero replicas": ({"pools": {"greedy": {"replicas": 0}}}, "should be greater than or equal to 1"),
    "unknown policy": ({"routing": {"policy": "Fastest"}}, "Unsupported value"),
    "negative threshold": ({"routing": {"thresholdTokens": -1}}, "should be greater than or equal to 0"),
    "malformed session key": ({"routing": {"sessionKeys": ["cookie:id"]}}, "should match"),
    "credential as session key": (
        {"routing": {"sessionKeys": ["header:x-session-id", "header:Authorization"]}},
        "sessionKeys must not contain headers with credentials",
    ),
    "sample ratio above 1": ({"telemetry": {"sampleRatio": 2}}, "should be less than or equal to 1"),
    "endpoint without scheme": ({"telemetry": {"otlpEndpoint": "collector:4317"}}, "should match"),
    "missing speculation": ({"pools": {"speculative": {"speculation": REMOVED}}}, "Required value"),
    "missing model": ({"model": REMOVED}, "Required value"),
    "malformed size": ({"sessionStore": {"managed": {"size": "big"}}}, "should match"),
    "unknown field name": ({"routing": {"treshold": 1}}, "unknown field"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_violation_of_a_rule_is_rejected(kube: Kube, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError) as refused:
        kube.apply(router(**change), dry_run=True)
    assert message in str(refused.value)


ACCEPTED: dict[str, dict[str, Any]] = {
    "common prefix cache": {
        "prefixCache": {
            "mode": "Common",
            "file": {"claim": {"size": "500Gi"}},
            "size": "400Gi",
            "minFree": "10Gi",
        }
    },
    "common prefix cache in a directory of the node": {
        "prefixCache": {"mode": "Common", "file": {"hostPath": "/mnt/kv"}, "size": 1073741824}
    },
    "model in a bucket, draft in an image": {
        "model": {
            "source": {
                "s3": {
                    "uri": "s3://models/qwen/",
                    "endpoint": "http://minio.storage.svc:9000",
                    "credentialsSecretRef": {"name": "bucket"},
                }
            }
        },
        "pools": {
            "speculative": {
                "speculation": {
                    "draftSource": {"oci": {"image": "registry.example.com/draft:1", "path": "d"}}
                }
            }
        },
    },
    "caches of the engines": {"engine": {"cache": {"emptyDir": {"sizeLimit": "20Gi"}}}},
    "common prefix cache in Mooncake": {
        "prefixCache": {
            "mode": "Common",
            "backend": "Mooncake",
            "mooncake": {"segmentSize": "64Gi", "protocol": "RDMA", "devices": ["mlx5_0"], "master": {}},
        }
    },
    "external Mooncake master": {
        "prefixCache": {
            "mode": "Common",
            "backend": "Mooncake",
            "mooncake": {"segmentSize": 1073741824, "externalMaster": "mooncake.storage.svc:50051"},
        }
    },
    "separate prefix caches": {"prefixCache": {}},
    "minimal": {},
    "GPU budget": {"gpuBudget": {"gpus": 4}, "engine": {"tensorParallel": 2}},
    "shared GPU": {"placement": "SharedGPU", "pools": {"greedy": {"replicas": 1}}},
    "Ngram": speculation(algorithm="Ngram", draftTokens=8),
    "draft tree": speculation(algorithm="Eagle3", draftModel="m", steps=3, topK=4, draftTokens=16),
    "null threshold": {"routing": {"thresholdTokens": None}},
    "strategy without surge": {"pools": {"greedy": {"strategy": {"maxSurge": 0, "maxUnavailable": "50%"}}}},
    "Recreate": {"pools": {"greedy": {"strategy": {"type": "Recreate"}}}},
    "external scaling": {"pools": {"speculative": {"scaling": "External"}}},
    "size as an integer": {"sessionStore": {"managed": {"size": 1073741824}}},
    "resources as numbers": {"pools": {"greedy": {"resources": {"requests": {"cpu": 4, "memory": "8Gi"}}}}},
    "gateway limits and timeouts": {
        "gateway": {
            "limits": {"maxQueued": 0},
            "timeouts": {"queueSeconds": 2.5, "totalSeconds": 60},
            "workers": 2,
            "drainSeconds": 30,
        }
    },
    "sample ratio": {"telemetry": {"sampleRatio": 0.05, "otlpEndpoint": "http://collector:4317"}},
}


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_valid_object_is_accepted(kube: Kube, change: dict[str, Any]) -> None:
    kube.apply(router(**change), dry_run=True)


IMMUTABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "storage class of the cache": (
        {"model": {"cache": {"size": "10Gi", "storageClassName": "slow"}}},
        {"model": {"cache": {"size": "10Gi", "storageClassName": "fast"}}},
        "cache.storageClassName cannot be changed",
    ),
    "storage class for a cache without one": (
        {"model": {"cache": {"size": "10Gi"}}},
        {"model": {"cache": {"size": "10Gi", "storageClassName": "fast"}}},
        "cache.storageClassName cannot be changed",
    ),
    "access mode of the cache": (
        {"model": {"cache": {"size": "10Gi"}}},
        {"model": {"cache": {"size": "10Gi", "accessMode": "ReadWriteOnce"}}},
        "cache.accessMode cannot be changed",
    ),
    "smaller cache": (
        {"model": {"cache": {"size": "10Gi"}}},
        {"model": {"cache": {"size": "9Gi"}}},
        "cache.size cannot be decreased",
    ),
    "size of the managed store": (
        {"sessionStore": {"managed": {"size": "1Gi"}}},
        {"sessionStore": {"managed": {"size": "2Gi"}}},
        "sessionStore.managed.size cannot be changed",
    ),
    "size of the managed store that was unset": (
        {},
        {"sessionStore": {"managed": {"size": "2Gi"}}},
        "sessionStore.managed.size cannot be changed",
    ),
    "storage class of the managed store": (
        {"sessionStore": {"managed": {}}},
        {"sessionStore": {"managed": {"storageClassName": "fast"}}},
        "sessionStore.managed.storageClassName cannot be changed",
    ),
    "storage class of the prefix cache": (
        {"prefixCache": {"file": {"claim": {"size": "1Gi"}}}},
        {"prefixCache": {"file": {"claim": {"size": "1Gi", "storageClassName": "fast"}}}},
        "claim.storageClassName cannot be changed",
    ),
    "smaller volume of the engines' cache": (
        {"engine": {"cache": {"claim": {"size": "2Gi"}}}},
        {"engine": {"cache": {"claim": {"size": "1Gi"}}}},
        "claim.size cannot be decreased",
    ),
    "smaller volume of the prefix cache": (
        {"prefixCache": {"file": {"claim": {"size": "2Gi"}}}},
        {"prefixCache": {"file": {"claim": {"size": "1Gi"}}}},
        "claim.size cannot be decreased",
    ),
}


@pytest.mark.parametrize(("before", "after", "message"), IMMUTABLE.values(), ids=IMMUTABLE.keys())
def test_change_of_immutable_field_is_rejected(
    kube: Kube, before: dict[str, Any], after: dict[str, Any], message: str
) -> None:
    kube.apply(router(**before))
    with pytest.raises(RefusedError) as refused:
        kube.apply(router(**after), dry_run=True)
    assert message in str(refused.value)


def test_cache_can_grow(kube: Kube) -> None:
    kube.apply(router(model={"cache": {"size": "900Mi"}}))
    kube.apply(router(model={"cache": {"size": "1Gi"}}))


def test_omitted_field_stays_unset_so_that_its_alternative_can_be_set_later(kube: Kube) -> None:
    kube.apply(router())
    kube.apply(router(gateway={"autoscaling": {"maxReplicas": 5}}))


NAMES = {
    "q" * 51: "metadata.name must have at most 50 characters",
    "7b": "metadata.name must start with a letter",
    "qwen.7b": "metadata.name must start with a letter",
}


@pytest.mark.parametrize(("name", "message"), NAMES.items())
def test_name_invalid_for_children_is_rejected(kube: Kube, name: str, message: str) -> None:
    with pytest.raises(RefusedError) as refused:
        kube.apply(router(name), dry_run=True)
    assert message in str(refused.value)


def rules(schema: Any) -> list[str]:
    """The messages of all rules in a schema."""
    if isinstance(schema, list):
        return [message for part in schema for message in rules(part)]
    if not isinstance(schema, dict):
        return []
    own = [rule["message"] for rule in schema.get("x-kubernetes-validations", [])]
    return own + [message for part in schema.values() for message in rules(part)]


def test_every_rule_has_a_test_case() -> None:
    tested = [message for _, message in REFUSED.values()]
    tested += [message for _, _, message in IMMUTABLE.values()]
    tested += NAMES.values()
    found = rules(crd())
    assert len(found) > 15
    assert [rule for rule in found if not any(message in rule for message in tested)] == []


def test_defaults_are_stored_in_the_object(kube: Kube) -> None:
    kube.apply(router(routing={"thresholdTokens": None}), server_side=True)
    spec = kube.get("dpsrouter", "qwen")["spec"]
    assert spec["routing"] == {
        "policy": "DeltaPrefill",
        "sessionKeys": [],
        "sessionTTLSeconds": 3600,
        "thresholdTokens": None,
    }
    assert spec["nodePool"]["profile"] == "A100-80GB"


def test_scale_subresource_and_category_work(kube: Kube) -> None:
    kube.apply(router(gateway={"replicas": 2}))
    kube.kubectl("scale", "dps/qwen", "--replicas", "3")
    assert "qwen" in kube.kubectl("get", "inference")
    assert kube.get("dpsrouter", "qwen")["spec"]["gateway"]["replicas"] == 3
