"""The gateway: its Deployment, Services, and permissions."""

import math

from dps_operator.api.gateway import DEFAULT_GATEWAY_REPLICAS
from dps_operator.api.session_store import CA_FILE
from dps_operator.api.types import plain_env, to_wire
from dps_operator.builders.credentials import CREDENTIALS, entry
from dps_operator.builders.gateway_config import (
    ADMIN_PORT,
    ADMIN_TOKEN_FILE,
    CACHE_DIR,
    CONFIG_FILE,
    ENGINE_KEY_FILE,
    KEYS_DIR,
    PORT,
    REDIS_URL_FILE,
    TLS_DIR,
    gateway_config,
    model_section,
    read_at_start,
    tokenizer_source,
)
from dps_operator.builders.pods import (
    container_resources,
    overlay,
    pod_template,
    pull_secrets,
    restricted,
    spread,
)
from dps_operator.builders.sources import TOKENIZER_FILES, Target, source_additions
from dps_operator.builders.store import redis_url_source
from dps_operator.resources import (
    MODELS,
    STARTUP_CONFIG_HASH,
    Manifest,
    Router,
    child,
    child_name,
    digest,
    selector,
)
from dps_operator.settings import Settings

CONFIG_DIR = "/etc/dps"
ADMIN_TOKEN_KEY = "admin-token"
USER = 65532
DRAIN_DELAY_SECONDS = 5
"""The gateway's default of timeouts.drainDelaySeconds."""
EXIT_SECONDS = 25
"""Time that a gateway has to exit after it has drained, before it is killed, in seconds."""
SETTLE_SECONDS = 5
"""minReadySeconds of the Deployment: nodes program a new Service endpoint a second or more after readiness."""
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


def admin_entries(namespace: str, router_name: str, token: str) -> dict[str, str]:
    """The token with which the gateways access each other's admin ports, as an entry of the namespace's Secret."""
    return {entry(router_name, "gateway", ADMIN_TOKEN_KEY): token}


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
    folder, _, file = ADMIN_TOKEN_FILE.rpartition("/")
    items = [{"key": entry(router.name, "gateway", ADMIN_TOKEN_KEY), "path": file}]
    mounts.append({"name": "admin-token", "mountPath": folder, "readOnly": True})
    volumes.append({"name": "admin-token", "secret": {"secretName": CREDENTIALS, "items": items}})
    if spec.gateway.auth is not None:
        mounts.append({"name": "keys", "mountPath": KEYS_DIR, "readOnly": True})
        volumes.append({"name": "keys", "secret": {"secretName": spec.gateway.auth.secret_name}})
    if spec.gateway.tls is not None:
        mounts.append({"name": "tls", "mountPath": TLS_DIR, "readOnly": True})
        volumes.append({"name": "tls", "secret": {"secretName": spec.gateway.tls.secret_name}})
    key = spec.engine.api_key_secret_ref
    if key is not None:
        folder, _, file = ENGINE_KEY_FILE.rpartition("/")
        items = [{"key": key.key, "path": file}]
        mounts.append({"name": "engine-key", "mountPath": folder, "readOnly": True})
        volumes.append({"name": "engine-key", "secret": {"secretName": key.name, "items": items}})
    url = spec.session_store.url_secret_ref
    if url is not None:
        folder, _, file = REDIS_URL_FILE.rpartition("/")
        items = [{"key": url.key, "path": file}]
        mounts.append({"name": "redis-url", "mountPath": folder, "readOnly": True})
        # If the Secret is missing, the pod's status states this because of the variable DPS_REDIS_URL; a missing volume
        # would only be visible in events.
        source = {"secretName": url.name, "items": items, "optional": True}
        volumes.append({"name": "redis-url", "secret": source})
    authorities = spec.session_store.ca_secret_ref
    if authorities is not None:
        folder, _, file = CA_FILE.rpartition("/")
        items = [{"key": authorities.key, "path": file}]
        mounts.append({"name": "redis-ca", "mountPath": folder, "readOnly": True})
        volumes.append({"name": "redis-ca", "secret": {"secretName": authorities.name, "items": items}})
    cache = spec.model.cache
    if cache is not None and model_section(spec.model)["tokenizer"].startswith(f"{MODELS}/"):
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
    source = tokenizer_source(router.spec.model)
    template = pod_template(
        router,
        "gateway",
        overlay(pod, source_additions(source, "model", SOURCE, settings.loader_image)),
        gateway.pod_template,
        {STARTUP_CONFIG_HASH: digest([read_at_start(gateway_config(router)), store_revision])},
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
    exposure = {
        field: value for field, value in to_wire(service).items() if field not in ("port", "annotations")
    }
    port: Manifest = {"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"}
    if router.spec.gateway.tls is not None:
        # Controllers of Ingresses and Gateways that support it then use TLS.
        port["appProtocol"] = "https"
    clients = child(
        router,
        "v1",
        "Service",
        "gateway",
        dict(service.annotations),
        spec={
            **exposure,
            "selector": selector(router, "gateway"),
            "ports": [port],
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
