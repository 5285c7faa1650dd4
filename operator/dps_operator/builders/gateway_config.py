"""The configuration file of the gateway, and its ConfigMap."""

from typing import Any

import yaml

from dps_engines.pools import POOLS, PoolName
from dps_operator.api.model import ServedModel
from dps_operator.api.sources import ModelSource
from dps_operator.api.spec import Spec
from dps_operator.api.types import to_wire
from dps_operator.builders.pool_engines import runtime_of
from dps_operator.builders.prefix_cache import shared
from dps_operator.builders.sources import model_path
from dps_operator.errors import SpecError
from dps_operator.resources import MODELS, Component, Manifest, Router, child, child_name
from dps_operator.scale_to_zero.rules import pools_with_zero

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


def tokenizer_source(model: ServedModel) -> ModelSource | None:
    """The source that contains the gateway's tokenizer; None if the tokenizer is on the Hub or the cache volume."""
    return model.source if model.tokenizer is None else None


def model_section(model: ServedModel) -> dict[str, Any]:
    """The section `model`. Raises SpecError if the tokenizer is not on the Hub or a volume of the gateway."""
    path = model_path(tokenizer_source(model), "model", CACHE_DIR)
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


def _service(router: Router, component: Component, port: int) -> dict[str, Any]:
    """A Service whose endpoints the gateway discovers."""
    return {"service": {"name": child_name(router, component), "namespace": router.namespace, "port": port}}


def _listen(spec: Spec) -> dict[str, Any]:
    section: dict[str, Any] = {
        "host": "0.0.0.0",
        "port": PORT,
        "adminPort": ADMIN_PORT,
        "adminTokenFile": ADMIN_TOKEN_FILE,
    }
    if spec.gateway.workers > 1:
        section["workers"] = spec.gateway.workers
    if spec.gateway.tls is not None:
        # The keys of a Secret of the type kubernetes.io/tls.
        section["tls"] = {"certFile": f"{TLS_DIR}/tls.crt", "keyFile": f"{TLS_DIR}/tls.key"}
    return section


def _model(spec: Spec) -> dict[str, Any]:
    section = model_section(spec.model)
    if spec.gateway.model_aliases:
        section["aliases"] = dict.fromkeys(spec.gateway.model_aliases, section["name"])
    if not spec.gateway.strict_model:
        section["strict"] = False
    return section


def _pool(router: Router, pool: PoolName) -> dict[str, Any]:
    section = _service(router, pool, runtime_of(router.spec, pool).port)
    if router.spec.engine.api_key_secret_ref is not None:
        section["apiKeyFile"] = ENGINE_KEY_FILE
    return section


def _routing(spec: Spec) -> dict[str, Any]:
    section: dict[str, Any] = {
        "policy": spec.routing.policy,
        "thresholdTokens": spec.routing.threshold_tokens,
    }
    if spec.suspend:
        section["suspended"] = True
    if shared(spec) is not None:
        section["commonPrefixCache"] = True
    if spec.routing.calibration is not None:
        section["decisionLog"] = DECISION_LOG
    return section


def _session(router: Router) -> dict[str, Any]:
    spec = router.spec
    section: dict[str, Any] = {
        "ttlSeconds": spec.routing.session_ttl_seconds,
        "redisTimeoutSeconds": spec.session_store.timeout_seconds or REDIS_TIMEOUT_SECONDS,
        # While Redis is unavailable, replicas query each other's cached records.
        "peers": _service(router, "metrics", ADMIN_PORT),
    }
    if spec.session_store.url_secret_ref is not None:
        section["redisUrlFile"] = REDIS_URL_FILE
        # Other routers may use the same Redis.
        section["scope"] = f"{router.namespace}/{router.name}"
    if spec.session_store.mirror_records is not None:
        section["mirrorRecords"] = spec.session_store.mirror_records
    if spec.routing.session_keys:
        section["keys"] = list(spec.routing.session_keys)
    return section


def _telemetry(router: Router) -> dict[str, Any]:
    telemetry = router.spec.telemetry
    section: dict[str, Any] = {}
    if telemetry.otlp_endpoint is not None:
        section = {
            "otlpEndpoint": telemetry.otlp_endpoint,
            "protocol": telemetry.protocol,
            "sampleRatio": telemetry.sample_ratio,
            "serviceName": child_name(router, "gateway"),
        }
    if telemetry.access_log:
        section["accessLog"] = ACCESS_LOG
    return section


def _timeouts(spec: Spec) -> dict[str, Any]:
    wake = {"wakeSeconds": WAKE_SECONDS} if pools_with_zero(spec) else {}
    return {"drainSeconds": spec.gateway.drain_seconds, **wake, **to_wire(spec.gateway.timeouts)}


def gateway_config(router: Router) -> dict[str, Any]:
    """The gateway's configuration. The URL of Redis, which contains a password, is not part of it."""
    spec = router.spec
    name = child_name(router, "gateway")
    config: dict[str, Any] = {
        "configMap": {"name": name, "namespace": router.namespace, "key": CONFIG_FILE},
        "listen": _listen(spec),
        "model": _model(spec),
        "pools": {pool: _pool(router, pool) for pool in POOLS},
        "routing": _routing(spec),
        "session": _session(router),
        "timeouts": _timeouts(spec),
    }
    if limits := to_wire(spec.gateway.limits):
        config["limits"] = limits
    if spec.gateway.auth is not None:
        config["auth"] = {"keysFile": f"{KEYS_DIR}/keys"}
        if not spec.gateway.auth.isolate_cache:
            config["auth"]["isolateCache"] = False
    if telemetry := _telemetry(router):
        config["telemetry"] = telemetry
    return config


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
    return child(router, "v1", "ConfigMap", "gateway", data={CONFIG_FILE: text})
