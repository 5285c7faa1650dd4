"""The gateway: its configuration file, Deployment, Services, and permissions."""

import math
from typing import Any

import yaml

from dps_engines.pools import POOLS
from dps_operator.api.gateway import DEFAULT_GATEWAY_REPLICAS
from dps_operator.api.model import ServedModel
from dps_operator.api.session_store import CA_FILE
from dps_operator.api.sources import ModelSource
from dps_operator.api.types import plain_env, to_wire
from dps_operator.builders.pods import (
    container_resources,
    overlay,
    pod_template,
    pull_secrets,
    restricted,
    spread,
)
from dps_operator.builders.prefix_cache import shared
from dps_operator.builders.runtime import runtime_of
from dps_operator.builders.sources import TOKENIZER_FILES, Target, model_path, source_additions
from dps_operator.builders.store import redis_url_source
from dps_operator.errors import SpecError
from dps_operator.resources import CONFIG_HASH, MODELS, Manifest, Router, child, child_name, digest, selector
from dps_operator.scale_to_zero.rules import pools_with_zero
from dps_operator.settings import Settings

PORT = 8000
ADMIN_PORT = 9090
CONFIG_DIR = "/etc/dps"
CONFIG_FILE = "config.yaml"
KEYS_DIR = "/etc/dps-keys"
REDIS_URL_FILE = "/etc/dps-redis-url/url"
CACHE_DIR = "/var/cache/dps"
DECISION_LOG = f"{CACHE_DIR}/decisions.jsonl"
USER = 65532
DRAIN_DELAY_SECONDS = 5
"""The gateway's default of timeouts.drainDelaySeconds."""
EXIT_SECONDS = 25
"""Time that a gateway has to exit after it has drained, before it is killed, in seconds."""
SETTLE_SECONDS = 5
"""minReadySeconds of the Deployment: nodes program a new Service endpoint a second or more after readiness."""
WAKE_SECONDS = 600
"""Time that a request waits for an engine to start, if a pool may be scaled to zero. OpenAI's clients wait as long."""
REDIS_TIMEOUT_SECONDS = 0.25
"""Longer than the gateway's default, so that the delays of a gateway with little CPU time do not count as a Redis
outage."""
DEFAULT_RESOURCES: Manifest = {
    "requests": {"cpu": "500m", "memory": "512Mi"},
    "limits": {"memory": "2Gi"},
}
SOURCE = Target(
    name="gateway",
    volume="cache",
    folder=CACHE_DIR,
    resources={"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
    security=restricted(USER)[1],
    files=TOKENIZER_FILES,
)
"""Only the tokenizer is downloaded."""
READ_AT_START = ("listen", "model", "telemetry")
"""Sections that a gateway reads only at startup, as routing.decisionLog. A change in them restarts it; everything else
is hot-reloaded."""


def _tokenizer_source(model: ServedModel) -> ModelSource | None:
    """The source that contains the gateway's tokenizer; None if the tokenizer is on the Hub or the cache volume."""
    return model.source if model.tokenizer is None else None


def _model(model: ServedModel) -> dict[str, Any]:
    """The section `model`. Raises SpecError if the tokenizer is not on the Hub or a volume of the gateway."""
    path = model_path(_tokenizer_source(model), "model", CACHE_DIR)
    if path is not None:
        return {"name": model.served_name or model.name, "tokenizer": path}
    tokenizer = model.tokenizer or model.name
    if "://" in tokenizer:
        raise SpecError(
            f"spec.model.tokenizer: the gateway cannot load a tokenizer from {tokenizer}; set it to a model id on the "
            f"Hub or a path under {MODELS}"
        )
    cache = model.cache
    if (
        tokenizer.startswith(f"{MODELS}/")
        and cache is not None
        and cache.size
        and cache.access_mode == "ReadWriteOnce"
    ):
        raise SpecError(
            f"spec.model.tokenizer: {tokenizer} is on a volume that each engine pod creates for itself, which the "
            "gateway cannot mount; set it to a model id, or use model.cache.existingClaim or ReadWriteMany"
        )
    section = {"name": model.served_name or model.name, "tokenizer": tokenizer}
    if model.revision is not None and tokenizer == model.name:
        section["revision"] = model.revision
    return section


def gateway_config(router: Router) -> dict[str, Any]:
    """The gateway's configuration. The URL of Redis contains a password and is passed in DPS_REDIS_URL instead."""
    spec = router.spec
    config: dict[str, Any] = {
        "configMap": {
            "name": child_name(router, "gateway"),
            "namespace": router.namespace,
            "key": CONFIG_FILE,
        },
        "listen": {
            "host": "0.0.0.0",
            "port": PORT,
            "adminPort": ADMIN_PORT,
            **({"workers": spec.gateway.workers} if spec.gateway.workers > 1 else {}),
        },
        "model": _model(spec.model),
        "pools": {
            pool: {
                "service": {
                    "name": child_name(router, pool),
                    "namespace": router.namespace,
                    "port": runtime_of(spec, pool).port,
                }
            }
            for pool in POOLS
        },
        "routing": {"policy": spec.routing.policy, "thresholdTokens": spec.routing.threshold_tokens},
        "session": {
            "ttlSeconds": spec.routing.session_ttl_seconds,
            "redisTimeoutSeconds": REDIS_TIMEOUT_SECONDS,
            # While Redis is unavailable, replicas query each other's cached records.
            "peers": {
                "service": {
                    "name": child_name(router, "metrics"),
                    "namespace": router.namespace,
                    "port": ADMIN_PORT,
                }
            },
        },
        "timeouts": {
            "drainSeconds": spec.gateway.drain_seconds,
            **({"wakeSeconds": WAKE_SECONDS} if pools_with_zero(spec) else {}),
            **to_wire(spec.gateway.timeouts),
        },
    }
    if spec.session_store.url_secret_ref is not None:
        config["session"]["redisUrlFile"] = REDIS_URL_FILE
        # Other routers may use the same Redis.
        config["session"]["scope"] = f"{router.namespace}/{router.name}"
    if spec.suspend:
        config["routing"]["suspended"] = True
    if shared(spec) is not None:
        config["routing"]["commonPrefixCache"] = True
    if spec.routing.calibration is not None:
        config["routing"]["decisionLog"] = DECISION_LOG
    if limits := to_wire(spec.gateway.limits):
        config["limits"] = limits
    if spec.routing.session_keys:
        config["session"]["keys"] = list(spec.routing.session_keys)
    if spec.gateway.auth is not None:
        config["auth"] = {"keysFile": f"{KEYS_DIR}/keys"}
        if not spec.gateway.auth.isolate_cache:
            config["auth"]["isolateCache"] = False
    if spec.telemetry.otlp_endpoint is not None:
        config["telemetry"] = {
            "otlpEndpoint": spec.telemetry.otlp_endpoint,
            "protocol": spec.telemetry.protocol,
            "sampleRatio": spec.telemetry.sample_ratio,
            "serviceName": child_name(router, "gateway"),
        }
    return config


def gateway_config_map(router: Router) -> Manifest:
    """The ConfigMap with the configuration file."""
    text = yaml.safe_dump(gateway_config(router), sort_keys=False)
    return child(router, "v1", "ConfigMap", "gateway", data={CONFIG_FILE: text})


def _grace_seconds(router: Router) -> int:
    """Time between SIGTERM and SIGKILL for a gateway pod, in seconds."""
    gateway = router.spec.gateway
    delay = gateway.timeouts.drain_delay_seconds
    delay = DRAIN_DELAY_SECONDS if delay is None else delay
    return math.ceil(delay) + gateway.drain_seconds + EXIT_SECONDS


def _mounts(router: Router) -> tuple[list[Manifest], list[Manifest]]:
    """The container's mounts and the pod's volumes."""
    spec = router.spec
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "cache", "mountPath": CACHE_DIR},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": child_name(router, "gateway")}},
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if spec.gateway.auth is not None:
        mounts.append({"name": "keys", "mountPath": KEYS_DIR, "readOnly": True})
        volumes.append({"name": "keys", "secret": {"secretName": spec.gateway.auth.secret_name}})
    url = spec.session_store.url_secret_ref
    if url is not None:
        folder, _, file = REDIS_URL_FILE.rpartition("/")
        items = [{"key": url.key, "path": file}]
        mounts.append({"name": "redis-url", "mountPath": folder, "readOnly": True})
        # A pod whose Secret is missing says so because of the variable DPS_REDIS_URL; a missing volume would only be
        # visible in events.
        source = {"secretName": url.name, "items": items, "optional": True}
        volumes.append({"name": "redis-url", "secret": source})
    authorities = spec.session_store.ca_secret_ref
    if authorities is not None:
        folder, _, file = CA_FILE.rpartition("/")
        items = [{"key": authorities.key, "path": file}]
        mounts.append({"name": "redis-ca", "mountPath": folder, "readOnly": True})
        volumes.append({"name": "redis-ca", "secret": {"secretName": authorities.name, "items": items}})
    cache = spec.model.cache
    if cache is not None and _model(spec.model)["tokenizer"].startswith(f"{MODELS}/"):
        # The tokenizer is stored with the weights, so the gateway mounts the same volume.
        claim = cache.existing_claim or child_name(router, "models")
        mounts.append({"name": "models", "mountPath": MODELS, "readOnly": True})
        volumes.append({"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    return mounts, volumes


def _container(router: Router, settings: Settings, mounts: list[Manifest]) -> Manifest:
    spec = router.spec
    env: list[Manifest] = [
        *plain_env({"HF_HOME": CACHE_DIR, "HOME": CACHE_DIR}),
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "DPS_REDIS_URL", "valueFrom": redis_url_source(router)},
    ]
    if spec.model.token_secret_ref is not None:
        reference = to_wire(spec.model.token_secret_ref)
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}})

    def probe(path: str, **timing: int) -> Manifest:
        return {"httpGet": {"path": path, "port": "admin"}, **timing}

    return {
        "name": "gateway",
        "image": spec.gateway.image or settings.gateway_image,
        "args": ["gateway", "--config", f"{CONFIG_DIR}/{CONFIG_FILE}"],
        "env": env,
        "ports": [
            {"name": "http", "containerPort": PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": container_resources(DEFAULT_RESOURCES, spec.gateway.resources),
        # The first start downloads the tokenizer, which can take minutes.
        "startupProbe": probe("/livez", periodSeconds=2, timeoutSeconds=2, failureThreshold=150),
        "readinessProbe": probe("/readyz", periodSeconds=5, timeoutSeconds=2, failureThreshold=2),
        "livenessProbe": probe("/livez", periodSeconds=10, timeoutSeconds=5, failureThreshold=6),
        "securityContext": restricted(USER)[1],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def gateway_deployment(router: Router, settings: Settings, store_revision: str) -> Manifest:
    """The gateway's Deployment. A change of `store_revision`, which identifies the Redis credentials, restarts it."""
    gateway = router.spec.gateway
    mounts, volumes = _mounts(router)
    config = gateway_config(router)
    fixed = {section: value for section, value in config.items() if section in READ_AT_START}
    if "decisionLog" in config["routing"]:
        fixed["decisionLog"] = config["routing"]["decisionLog"]
    pod: Manifest = {
        "automountServiceAccountToken": True,
        "containers": [_container(router, settings, mounts)],
        "securityContext": restricted(USER)[0],
        "serviceAccountName": child_name(router, "gateway"),
        "terminationGracePeriodSeconds": _grace_seconds(router),
        "topologySpreadConstraints": spread(router, "gateway"),
        "volumes": volumes,
        **pull_secrets(settings),
    }
    source = _tokenizer_source(router.spec.model)
    template = pod_template(
        router,
        "gateway",
        overlay(pod, source_additions(source, "model", SOURCE, settings.loader_image)),
        gateway.pod_template,
        {CONFIG_HASH: digest([fixed, store_revision])},
    )
    spec: Manifest = {
        "selector": {"matchLabels": selector(router, "gateway")},
        "minReadySeconds": SETTLE_SECONDS,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "revisionHistoryLimit": 3,
        "template": template,
    }
    if gateway.autoscaling is None:
        spec["replicas"] = gateway.replicas or DEFAULT_GATEWAY_REPLICAS
    return child(router, "apps/v1", "Deployment", "gateway", spec=spec)


def gateway_services(router: Router) -> list[Manifest]:
    """The Service for clients, and a headless one for the admin port, which clients must not reach."""
    service = router.spec.gateway.service
    clients = child(
        router,
        "v1",
        "Service",
        "gateway",
        dict(service.annotations),
        spec={
            "type": service.type,
            "selector": selector(router, "gateway"),
            "ports": [{"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"}],
        },
    )
    metrics = child(
        router,
        "v1",
        "Service",
        "metrics",
        spec={
            "type": "ClusterIP",
            "clusterIP": "None",
            "selector": selector(router, "gateway"),
            "ports": [{"name": "admin", "port": ADMIN_PORT, "targetPort": "admin", "protocol": "TCP"}],
        },
    )
    return [clients, metrics]


def gateway_identity(router: Router) -> list[Manifest]:
    """The gateway's ServiceAccount. It may watch its own ConfigMap, and the EndpointSlices of its namespace."""
    name = child_name(router, "gateway")
    rules = [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        },
        {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["watch"]},
    ]
    return [
        child(router, "v1", "ServiceAccount", "gateway", automountServiceAccountToken=False),
        child(router, "rbac.authorization.k8s.io/v1", "Role", "gateway", rules=rules),
        child(
            router,
            "rbac.authorization.k8s.io/v1",
            "RoleBinding",
            "gateway",
            roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            subjects=[{"kind": "ServiceAccount", "name": name, "namespace": router.namespace}],
        ),
    ]
