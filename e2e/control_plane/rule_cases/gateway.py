"""The gateway, routing, the session store and telemetry."""

from e2e.control_plane.rule_cases.kinds import Accepted, Immutable, Refused

REFUSED: Refused = {
    "replicas and autoscaling of the gateway": (
        {"gateway": {"replicas": 2, "autoscaling": {"maxReplicas": 3}}},
        "set either replicas or autoscaling, not both",
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
    "timeout of zero": (
        {"gateway": {"timeouts": {"queueSeconds": 0}}},
        "spec.gateway.timeouts.queueSeconds in body should be greater than 0",
    ),
    "class of the load balancer of a Service without one": (
        {"gateway": {"service": {"loadBalancerClass": "example.com/nlb"}}},
        "gateway.service.loadBalancerClass and loadBalancerSourceRanges require the type LoadBalancer",
    ),
    "policy for external traffic of a Service without any": (
        {"gateway": {"service": {"externalTrafficPolicy": "Local"}}},
        "gateway.service.externalTrafficPolicy requires the type LoadBalancer or NodePort",
    ),
    "timeout of the session store of zero": (
        {"sessionStore": {"timeoutSeconds": 0}},
        "spec.sessionStore.timeoutSeconds in body should be greater than 0",
    ),
    "unknown policy": ({"routing": {"policy": "Fastest"}}, "Unsupported value"),
    "malformed session key": ({"routing": {"sessionKeys": ["cookie:id"]}}, "should match"),
    "credential as session key": (
        {"routing": {"sessionKeys": ["header:x-session-id", "header:Authorization"]}},
        "sessionKeys must not contain headers with credentials",
    ),
    "unknown field name": ({"routing": {"treshold": 1}}, "unknown field"),
}

ACCEPTED: Accepted = {
    "null threshold": {"routing": {"thresholdTokens": None}},
    "size as an integer": {"sessionStore": {"managed": {"size": 1073741824}}},
    "timeout of the session store": {"sessionStore": {"timeoutSeconds": 1}},
    "gateway limits and timeouts": {
        "gateway": {
            "limits": {"maxQueued": 0},
            "timeouts": {"queueSeconds": 2.5, "totalSeconds": 60},
            "drainSeconds": 30,
        }
    },
    "load balancer with a class": {
        "gateway": {
            "service": {
                "type": "LoadBalancer",
                "loadBalancerClass": "example.com/nlb",
                "loadBalancerSourceRanges": ["203.0.113.0/24", "2001:db8::/32"],
                "externalTrafficPolicy": "Local",
            }
        }
    },
    "sample ratio": {"telemetry": {"sampleRatio": 0.05, "otlpEndpoint": "http://collector:4317"}},
}

IMMUTABLE: Immutable = {
    "class of the load balancer": (
        {"gateway": {"service": {"type": "LoadBalancer"}}},
        {"gateway": {"service": {"type": "LoadBalancer", "loadBalancerClass": "example.com/nlb"}}},
        "gateway.service.loadBalancerClass cannot be changed",
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
}
