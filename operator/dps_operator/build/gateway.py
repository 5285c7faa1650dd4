"""The gateway: its configuration, Deployment, Services and permissions."""

import math
from collections.abc import Iterator
from typing import Any

import yaml

from dps_operator.api import CA_FILE, SecretKeyRef, to_wire
from dps_operator.build.pods import (
    TOKENIZER_FILES,
    Target,
    container_ports,
    container_resources,
    credential,
    overlay,
    plain_env,
    pod_template,
    probes,
    secret_env,
    service,
    source_additions,
    spread,
    volume,
)
from dps_operator.build.redis import URL_KEY
from dps_operator.effective import EffectivePool, Router, model_path
from dps_operator.errors import SpecError
from dps_operator.objects import (
    MODELS,
    STARTUP_CONFIG_HASH,
    Manifest,
    child_manifest,
    child_name,
    digest,
    given,
    selector,
)
from dps_operator.settings import Settings

PORT = 8000
ADMIN_PORT = 9090
CONFIG_FILE = "config.yaml"
KEYS_DIR = "/etc/dps-keys"
TLS_DIR = "/etc/dps-tls"
ENGINE_KEY_FILE = "/etc/dps-engine-key/key"
REDIS_URL_FILE = "/etc/dps-redis-url/url"
ADMIN_TOKEN_FILE = "/etc/dps-admin-token/token"
CACHE_DIR = "/var/cache/dps"
ACCESS_LOG = "/dev/stdout"
DECISION_LOG = f"{CACHE_DIR}/decisions.jsonl"
WAKE_SECONDS = 600
"""Time that a request waits for an engine to start, if a pool may be scaled to zero. OpenAI's clients wait as long."""
REDIS_TIMEOUT_SECONDS = 0.25
"""Default of sessionStore.timeoutSeconds. Longer than the gateway's default, so that the delays of a gateway with
little CPU time do not count as a Redis outage."""
READ_AT_START = ("listen", "model", "telemetry")
"""Sections that a gateway reads only at startup."""
SESSION_READ_AT_START = ("redisTimeoutSeconds", "mirrorRecords")
"""Keys of the section `session` that a gateway reads only at startup, and that may change."""
CONFIG_DIR = "/etc/dps"
ADMIN_TOKEN_KEY = "admin-token"
USER = 65532
DRAIN_DELAY_SECONDS = 5
"""The gateway's default of timeouts.drainDelaySeconds."""
EXIT_SECONDS = 25
"""Time that a gateway has to exit after it has drained, before it is killed, in seconds."""
SETTLE_SECONDS = 5
"""minReadySeconds of the Deployment: nodes program a new Service endpoint a second or more after readiness."""
DEFAULT_RESOURCES: Manifest = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}
SOURCE = Target(
    name="gateway",
    volume="cache",
    folder=CACHE_DIR,
    resources={"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
    files=TOKENIZER_FILES,
)
"""Only the tokenizer is downloaded."""


def _model(router: Router) -> dict[str, Any]:
    """The section `model`. Raises SpecError if the tokenizer is not on the Hub or a volume of the gateway."""
    model, gateway = router.spec.model, router.spec.gateway
    name, tokenizer = model.served_name or model.name, _tokenizer(router)
    return given(
        name=name,
        tokenizer=tokenizer,
        revision=model.revision if tokenizer == model.name else None,
        aliases=dict.fromkeys(gateway.model_aliases, name) or None,
        strict=None if gateway.strict_model else False,
        volatilePrompt=gateway.volatile_prompt,
    )


def _tokenizer(router: Router) -> str:
    path = model_path(router.tokenizer_source, "model", CACHE_DIR)
    if path is not None:
        return path
    tokenizer, cache = router.spec.model.tokenizer or router.spec.model.name, router.spec.model.cache
    if "://" in tokenizer:
        raise SpecError(
            f"spec.model.tokenizer: the gateway cannot load a tokenizer from {tokenizer}; set it to a model id on the "
            f"Hub or a path under {MODELS}"
        )
    own_disk = cache is not None and cache.size and cache.access_mode == "ReadWriteOnce"
    if tokenizer.startswith(f"{MODELS}/") and own_disk:
        raise SpecError(
            f"spec.model.tokenizer: {tokenizer} is on a volume that each engine pod creates for itself, which the "
            "gateway cannot mount; set it to a model id, or use model.cache.existingClaim or ReadWriteMany"
        )
    return tokenizer


def _pool(router: Router, pool: EffectivePool) -> dict[str, Any]:
    """A pool, with the Service whose endpoints the gateway discovers."""
    name, port = child_name(router, pool.name), pool.runtime.port
    return given(
        service={"name": name, "namespace": router.namespace, "port": port},
        apiKeyFile=None if router.spec.engine.api_key_secret_ref is None else ENGINE_KEY_FILE,
    )


def _routing(router: Router) -> dict[str, Any]:
    routing = router.spec.routing
    # A threshold that is null has a meaning.
    return {"policy": routing.policy, "thresholdTokens": routing.threshold_tokens} | given(
        minAcceptance=routing.min_acceptance,
        suspended=router.spec.suspend or None,
        commonPrefixCache=None if router.shared_cache is None else True,
        decisionLog=None if routing.calibration is None else DECISION_LOG,
    )


def _session(router: Router) -> dict[str, Any]:
    routing, store = router.spec.routing, router.spec.session_store
    external = store.url_secret_ref is not None
    return given(
        ttlSeconds=routing.session_ttl_seconds,
        redisTimeoutSeconds=store.timeout_seconds or REDIS_TIMEOUT_SECONDS,
        redisUrlFile=REDIS_URL_FILE if external else None,
        # Other routers may use the same Redis.
        scope=f"{router.namespace}/{router.name}" if external else None,
        mirrorRecords=store.mirror_records,
        keys=list(routing.session_keys) or None,
    )


def _telemetry(router: Router) -> dict[str, Any]:
    telemetry = router.spec.telemetry
    traces = {
        "otlpEndpoint": telemetry.otlp_endpoint,
        "protocol": telemetry.protocol,
        "sampleRatio": telemetry.sample_ratio,
        "serviceName": child_name(router, "gateway"),
    }
    others = given(traceUrl=telemetry.trace_url, accessLog=ACCESS_LOG if telemetry.access_log else None)
    return others if telemetry.otlp_endpoint is None else traces | others


def gateway_config(router: Router) -> dict[str, Any]:
    """The gateway's configuration. The URL of Redis, which contains a password, is not part of it."""
    gateway, auth = router.spec.gateway, router.spec.gateway.auth
    wake = {"wakeSeconds": WAKE_SECONDS} if router.may_scale_to_zero else {}
    separate = None if auth is None or auth.isolate_cache else False
    # The keys of a Secret of the type kubernetes.io/tls.
    tls = {"certFile": f"{TLS_DIR}/tls.crt", "keyFile": f"{TLS_DIR}/tls.key"}
    config_map = {"name": child_name(router, "gateway"), "namespace": router.namespace, "key": CONFIG_FILE}
    return given(
        configMap=config_map,
        listen=given(
            host="0.0.0.0",
            port=PORT,
            adminPort=ADMIN_PORT,
            adminTokenFile=ADMIN_TOKEN_FILE,
            tls=None if gateway.tls is None else tls,
        ),
        model=_model(router),
        pools={name: _pool(router, pool) for name, pool in router.pools.items()},
        routing=_routing(router),
        session=_session(router),
        timeouts={"drainSeconds": gateway.drain_seconds, **wake, **to_wire(gateway.timeouts)},
        limits=to_wire(gateway.limits) or None,
        retries=None if gateway.retries.continue_streams else {"continueStreams": False},
        auth=None if auth is None else given(keysFile=f"{KEYS_DIR}/keys", isolateCache=separate),
        telemetry=_telemetry(router) or None,
    )


def read_at_start(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that a gateway reads only at startup; it hot-reloads everything else."""
    fixed = {section: value for section, value in config.items() if section in READ_AT_START}
    fixed |= {key: value for key, value in config["session"].items() if key in SESSION_READ_AT_START}
    if "decisionLog" in config["routing"]:
        fixed["decisionLog"] = config["routing"]["decisionLog"]
    return fixed


def gateway_config_map(router: Router) -> Manifest:
    """The ConfigMap with the configuration file."""
    text = yaml.safe_dump(gateway_config(router), sort_keys=False)
    return child_manifest(router, "ConfigMap", "gateway", data={CONFIG_FILE: text})


def _volumes(router: Router) -> Iterator[Manifest]:
    """What to merge into the pod spec for each volume."""
    spec, store = router.spec, router.spec.session_store

    def mount(name: str, folder: str, **source: Any) -> Manifest:
        return volume("gateway", name, folder, read_only=True, **source)

    def mount_key(name: str, path: str, reference: SecretKeyRef, **options: Any) -> Manifest:
        """Mount one key of a Secret as a file."""
        folder, _, file = path.rpartition("/")
        items = [{"key": reference.key, "path": file}]
        return mount(name, folder, secret={"secretName": reference.name, "items": items, **options})

    yield mount("config", CONFIG_DIR, configMap={"name": child_name(router, "gateway")})
    yield volume("gateway", "cache", CACHE_DIR, emptyDir={})
    yield volume("gateway", "tmp", "/tmp", emptyDir={})
    yield mount_key("admin-token", ADMIN_TOKEN_FILE, credential(router, "gateway", ADMIN_TOKEN_KEY))
    if spec.gateway.auth is not None:
        yield mount("keys", KEYS_DIR, secret={"secretName": spec.gateway.auth.secret_name})
    if spec.gateway.tls is not None:
        yield mount("tls", TLS_DIR, secret={"secretName": spec.gateway.tls.secret_name})
    if (key := spec.engine.api_key_secret_ref) is not None:
        yield mount_key("engine-key", ENGINE_KEY_FILE, key)
    if (url := store.url_secret_ref) is not None:
        # If the Secret is missing, the pod's status states this because of the variable DPS_REDIS_URL; a missing volume
        # would only be visible in events.
        yield mount_key("redis-url", REDIS_URL_FILE, url, optional=True)
    if (authorities := store.ca_secret_ref) is not None:
        yield mount_key("redis-ca", CA_FILE, authorities)
    cache = spec.model.cache
    if cache is not None and _tokenizer(router).startswith(f"{MODELS}/"):
        # The tokenizer is stored with the weights, so the gateway mounts the same volume.
        claim = cache.existing_claim or child_name(router, "models")
        yield mount("models", MODELS, persistentVolumeClaim={"claimName": claim, "readOnly": True})


def gateway_deployment(router: Router, settings: Settings, store_revision: str) -> Manifest:
    """The gateway's Deployment. A change of `store_revision`, which identifies the Redis credentials, restarts it."""
    spec, gateway = router.spec, router.spec.gateway
    env: list[Manifest] = [
        *plain_env({"HF_HOME": CACHE_DIR, "HOME": CACHE_DIR}),
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        secret_env(
            "DPS_REDIS_URL", spec.session_store.url_secret_ref or credential(router, "redis", URL_KEY)
        ),
    ]
    if spec.model.token_secret_ref is not None:
        env.append(secret_env("HF_TOKEN", spec.model.token_secret_ref))
    container = {
        "name": "gateway",
        "image": gateway.image or settings.gateway_image,
        "args": ["gateway", "--config", f"{CONFIG_DIR}/{CONFIG_FILE}"],
        "env": env,
        "ports": container_ports(http=PORT, admin=ADMIN_PORT),
        "resources": container_resources(DEFAULT_RESOURCES, gateway.resources),
        # The first start downloads the tokenizer, which can take minutes.
        **probes(
            {"httpGet": {"path": "/readyz", "port": "admin"}},
            live={"httpGet": {"path": "/livez", "port": "admin"}},
        ),
    }
    delay = gateway.timeouts.drain_delay_seconds
    delay = DRAIN_DELAY_SECONDS if delay is None else delay
    pod: Manifest = {
        "automountServiceAccountToken": True,
        "containers": [container],
        "serviceAccountName": child_name(router, "gateway"),
        "terminationGracePeriodSeconds": math.ceil(delay) + gateway.drain_seconds + EXIT_SECONDS,
        "topologySpreadConstraints": spread(router, "gateway"),
    }
    source = source_additions(router.tokenizer_source, "model", SOURCE, settings.loader_image)
    for additions in (*_volumes(router), source):
        pod = overlay(pod, additions)
    template = pod_template(
        router,
        "gateway",
        settings,
        pod,
        gateway.pod_template,
        {STARTUP_CONFIG_HASH: digest([read_at_start(gateway_config(router)), store_revision])},
        user=USER,
    )
    deployment: Manifest = {
        "selector": {"matchLabels": selector(router, "gateway")},
        "minReadySeconds": SETTLE_SECONDS,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "revisionHistoryLimit": 3,
        "template": template,
    }
    if gateway.autoscaling is None:
        deployment["replicas"] = router.gateway_replicas
    return child_manifest(router, "Deployment", "gateway", spec=deployment)


def gateway_services(router: Router) -> list[Manifest]:
    """The Service for clients, and a headless one for the admin port, which clients must not reach."""
    exposure = to_wire(router.spec.gateway.service)
    port, annotations = exposure.pop("port"), exposure.pop("annotations")
    clients = service(router, "gateway", {"http": port}, **exposure)
    if annotations:
        clients["metadata"]["annotations"] = annotations
    if router.spec.gateway.tls is not None:
        # Controllers of Ingresses and Gateways that support it then use TLS.
        clients["spec"]["ports"][0]["appProtocol"] = "https"
    gateways = selector(router, "gateway")
    metrics = service(router, "metrics", {"admin": ADMIN_PORT}, clusterIP="None", selector=gateways)
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
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    subjects = [{"kind": "ServiceAccount", "name": name, "namespace": router.namespace}]
    return [
        child_manifest(router, "ServiceAccount", "gateway", automountServiceAccountToken=False),
        child_manifest(router, "Role", "gateway", rules=rules),
        child_manifest(router, "RoleBinding", "gateway", roleRef=role, subjects=subjects),
    ]
