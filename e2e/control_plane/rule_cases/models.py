"""Models, their sources, and the volumes for models and compile caches."""

from e2e.cluster.routers import REMOVED, speculation
from e2e.control_plane.rule_cases.kinds import Accepted, Immutable, Refused

REFUSED: Refused = {
    "cache with size and existing claim": (
        {"model": {"cache": {"size": "1Gi", "existingClaim": "models"}}},
        "set either cache.size, for a volume that the operator creates, or cache.existingClaim, not both",
    ),
    "storage class of an existing claim": (
        {"model": {"cache": {"existingClaim": "models", "storageClassName": "fast"}}},
        "cache.storageClassName requires cache.size; an existing claim already has a storage class",
    ),
    "adapters of the same name": (
        {"model": {"adapters": [{"name": "a", "path": "org/a"}, {"name": "a", "path": "org/b"}]}},
        "model.adapters must have different names",
    ),
    "revision of a model in a bucket": (
        {"model": {"revision": "v2", "source": {"s3": {"uri": "s3://models/qwen"}}}},
        "model.revision must not be set with model.source",
    ),
    "two sources of the model": (
        {"model": {"source": {"pvc": {"claimName": "w"}, "oci": {"image": "i"}}}},
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
    "folder above the bucket": (
        {"model": {"source": {"gs": {"uri": "gs://models/../other"}}}},
        "source.uri must not contain '..'",
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
    "missing model": ({"model": REMOVED}, "Required value"),
}

ACCEPTED: Accepted = {
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
}

IMMUTABLE: Immutable = {
    "storage class of the volume for compiled code": (
        {"engine": {"cache": {"claim": {"size": "1Gi"}}}},
        {"engine": {"cache": {"claim": {"size": "1Gi", "storageClassName": "fast"}}}},
        "claim.storageClassName cannot be changed",
    ),
    "smaller volume for compiled code": (
        {"engine": {"cache": {"claim": {"size": "2Gi"}}}},
        {"engine": {"cache": {"claim": {"size": "1Gi"}}}},
        "claim.size cannot be decreased",
    ),
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
    "smaller volume of the engines' cache": (
        {"engine": {"cache": {"claim": {"size": "2Gi"}}}},
        {"engine": {"cache": {"claim": {"size": "1Gi"}}}},
        "claim.size cannot be decreased",
    ),
}
