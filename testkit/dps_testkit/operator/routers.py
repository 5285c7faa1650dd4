"""DPSRouters for tests of the operator."""

from typing import Any

from dps_operator.effective import Router, effective_router
from dps_operator.observe import Observations
from dps_operator.settings import Settings

SETTINGS = Settings(
    gateway_image="gateway:1",
    redis_image="redis:7",
    plugin_image="operator:1",
    lab_image="lab:1",
    loader_image="rclone:1",
)
SMALLEST: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen2.5-7B-Instruct"},
    "pools": {
        "speculative": {
            "speculation": {"algorithm": "Standalone", "draftModel": "Qwen/Qwen2.5-1.5B-Instruct"}
        }
    },
}
EVERYTHING: dict[str, Any] = {
    "model": {
        "name": "meta-llama/Llama-3.1-8B-Instruct",
        "servedName": "llama",
        "tokenSecretRef": {"name": "hub", "key": "token"},
        "cache": {"size": "200Gi", "storageClassName": "filestore"},
    },
    "engine": {
        "version": "0.5.23",
        "tensorParallel": 2,
        "args": ["--mem-fraction-static", "0.85"],
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    },
    "nodePool": {
        "profile": "A100-40GB",
        "nodeSelector": {"pool": "llm"},
        "tolerations": [{"key": "team", "operator": "Equal", "value": "llm", "effect": "NoSchedule"}],
    },
    "pools": {
        "speculative": {
            "autoscaling": {"minReplicas": 2, "maxReplicas": 8, "targetInFlightPerReplica": 4},
            "speculation": {
                "algorithm": "Eagle3",
                "draftModel": "head",
                "steps": 5,
                "topK": 4,
                "draftTokens": 16,
            },
            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "resources": {"requests": {"cpu": 16}, "limits": {"memory": "200Gi"}},
            "podTemplate": {
                "metadata": {"annotations": {"note": "x"}},
                "spec": {"priorityClassName": "high"},
            },
        },
        "greedy": {"replicas": 3, "args": ["--chunked-prefill-size", "4096"]},
    },
    "gateway": {
        "autoscaling": {"maxReplicas": 6, "targetCPUPercent": 60},
        "image": "gateway:2",
        "service": {
            "type": "LoadBalancer",
            "port": 80,
            "annotations": {"lb": "internal"},
            "loadBalancerClass": "example.com/nlb",
            "loadBalancerSourceRanges": ["203.0.113.0/24", "2001:db8::/32"],
            "externalTrafficPolicy": "Local",
        },
        "ingress": {"host": "llm.example.com", "className": "nginx", "tlsSecretName": "tls"},
        "httpRoute": {
            "parentRefs": [{"name": "edge", "namespace": "infra"}],
            "hostnames": ["llm.example.com"],
        },
        "auth": {"secretName": "keys", "isolateCache": False},
    },
    "routing": {
        "policy": "TotalLength",
        "thresholdTokens": 4096,
        "sessionTTLSeconds": 600,
        "sessionKeys": ["header:x-session-id"],
        "calibration": {
            "schedule": "30 4 * * 1",
            "objective": "ttft-p95",
            "hardware": "a100-70b",
            "apply": True,
        },
    },
    "sessionStore": {
        "managed": {"size": "4Gi", "storageClassName": "ssd", "image": "valkey:8"},
        "mirrorRecords": 100_000,
    },
    "telemetry": {
        "otlpEndpoint": "http://collector:4317",
        "sampleRatio": 0.25,
        "traceUrl": "https://tracing.example/{trace}",
        "accessLog": True,
        "serviceMonitor": {"interval": "15s", "labels": {"release": "prometheus"}},
    },
    "networkPolicy": {"monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
}
PREFIX_CACHE: dict[str, Any] = {
    **SMALLEST,
    "engine": {"version": "0.5.23"},
    "prefixCache": {
        "mode": "Common",
        "mooncake": {"segmentSize": "64Gi", "externalMaster": "mooncake.storage.svc:50051"},
    },
}
SOURCES: dict[str, Any] = {
    "model": {
        "name": "meta-llama/Llama-3.1-8B-Instruct",
        "source": {
            "s3": {
                "uri": "s3://models/llama/8b/",
                "endpoint": "https://minio.example.com",
                "region": "eu-central-1",
                "credentialsSecretRef": {"name": "bucket"},
            }
        },
    },
    "engine": {"version": "0.5.23", "cache": {"claim": {"size": "50Gi", "storageClassName": "filestore"}}},
    "pools": {
        "speculative": {
            "speculation": {
                "algorithm": "Eagle3",
                "draftModel": "head",
                "draftSource": {"oci": {"image": "registry.example.com/head:1", "path": "models/head"}},
            }
        }
    },
}
SOURCES_VLLM: dict[str, Any] = {
    "model": {
        "name": "llama",
        "source": {"pvc": {"claimName": "weights", "path": "llama/8b"}},
        "cache": {"size": "100Gi"},
    },
    "engine": {"runtime": "VLLM", "cache": {"hostPath": "/var/cache/vllm"}},
    "nodePool": {"profile": "None"},
    "pools": {
        "speculative": {
            "speculation": {
                "algorithm": "Standalone",
                "draftModel": "small",
                "draftSource": {
                    "gs": {
                        "uri": "gs://models/small",
                        "credentialsSecretRef": {"name": "gcp", "key": "key.json"},
                    }
                },
            }
        }
    },
}
MOONCAKE: dict[str, Any] = {
    **SMALLEST,
    "engine": {"version": "0.5.23", "args": ["--kv-cache-dtype", "fp8_e5m2"]},
    "prefixCache": {
        "mode": "Common",
        "mooncake": {
            "segmentSize": "64Gi",
            "protocol": "RDMA",
            "devices": ["mlx5_0", "mlx5_1"],
            "master": {"podTemplate": {"spec": {"nodeSelector": {"pool": "cpu"}}}},
        },
    },
    "networkPolicy": {"monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]},
}
VLLM: dict[str, Any] = {
    "model": SMALLEST["model"],
    "engine": {"runtime": "VLLM", "image": "registry.example.com/vllm-suffix:v0.32.0"},
    "pools": {"speculative": {"speculation": {"algorithm": "Suffix"}}},
    "networkPolicy": {},
}


def router(
    spec: dict[str, Any],
    name: str = "qwen",
    status: dict[str, Any] | None = None,
    observations: Observations | None = None,
) -> Router:
    """A DPSRouter with this spec, its recorded status, and what is observed of it."""
    metadata = {"namespace": "serving", "name": name, "uid": "uid-1"}
    body = {"metadata": metadata, "spec": spec, "status": status or {}}
    return effective_router(body, observations or Observations())


def smallest(**pools: Any) -> Router:
    """The minimal DPSRouter, with changes to `pools`."""
    return router({**SMALLEST, "pools": {**SMALLEST["pools"], **pools}})
