"""The gateway's parts, constructed from a configuration and updated when it is reloaded."""

import logging
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Self

from pydantic.alias_generators import to_camel

from dps_gateway.auth import BodyBudget, KeyLimits, Keys
from dps_gateway.config import (
    ConfigError,
    ConfigFile,
    GatewayConfig,
    PoolConfig,
    Pools,
    TlsFiles,
    current_redis_url,
    read_line,
)
from dps_gateway.engine.sglang import SGLang
from dps_gateway.pool import Pool
from dps_gateway.prompt.prefixes import CacheSalt
from dps_gateway.prompt.renderer import PromptRenderer
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.routing.decision import Policy
from dps_gateway.session.identity import Scope, SessionKey, parse_session_key
from dps_gateway.session.redis import Client, RedisBackend, connect
from dps_gateway.session.store import Mirror, SessionStore
from dps_gateway.shared_learning import SharedLearning
from dps_gateway.telemetry.json_log import JsonLog
from dps_gateway.telemetry.metrics import Metrics
from dps_gateway.telemetry.recent import Recent
from dps_gateway.telemetry.tracing import Tracing
from dps_gateway.turn import Turns
from dps_gateway.upstream.admission import Admission
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.exchange import Upstream
from dps_gateway.upstream.retries import FatalRequests, RetryBudget

log = logging.getLogger(__name__)

FIXED_SECTIONS: Final = ("listen", "model", "telemetry")
"""Sections that are read only when the gateway starts."""

_FIXED_KEYS: Final = (
    "routing.decision_log",
    "session.redis_url",
    "session.redis_url_file",
    "session.scope",
    "session.redis_timeout_seconds",
    "session.mirror_records",
    "timeouts.drain_seconds",
)
"""Keys of other sections that are read only then."""


@dataclass(frozen=True, slots=True)
class _Reloadable:
    """The values derived from a configuration, and from the files that it names, each time it is loaded."""

    keys: Keys | None
    engine_keys: Mapping[Pool, str | None]
    trust: Mapping[Pool, ssl.SSLContext | bool]
    certificate: ssl.SSLContext | None
    admin_token: str | None
    redis_url: str | None
    policy: Policy
    session_keys: tuple[SessionKey, ...]

    @classmethod
    def load(cls, config: GatewayConfig) -> Self:
        """Raises ConfigError if a file that the configuration names cannot be used."""
        return cls(
            keys=Keys.load(config.auth.keys_file) if config.auth.keys_file else None,
            engine_keys={
                pool: read_line(config.pools[pool].api_key_file, f"pools.{pool}.apiKeyFile", "API key")
                for pool in Pool
            },
            trust={pool: _trust(config.pools[pool].ca_file, f"pools.{pool}.caFile") for pool in Pool},
            certificate=_certificate(config.listen.tls) if config.listen.tls else None,
            admin_token=read_line(config.listen.admin_token_file, "listen.adminTokenFile", "token"),
            redis_url=current_redis_url(config.session),
            policy=config.routing.build(),
            session_keys=tuple(parse_session_key(key) for key in config.session.keys),
        )


class Runtime:
    """The state that all request handlers share. Construct it inside a running event loop.

    Raises ConfigError if the configuration cannot be used.
    """

    def __init__(self, config: GatewayConfig, tokenizer: Tokenizer) -> None:
        loaded = _Reloadable.load(config)
        self.metrics = Metrics()
        self._redis_url = loaded.redis_url
        self.redis: RedisBackend | None = None
        if loaded.redis_url is not None:
            self.redis = RedisBackend(
                _client(config, loaded.redis_url),
                config.session.redis_timeout_seconds,
                lambda kind: self.metrics.state_errors.labels(kind).inc(),
            )
        self.tracing = Tracing(config.telemetry)
        self.decision_log = _json_log(
            config.routing.decision_log, "decision log", self.metrics.decision_log_dropped.inc
        )
        self.recent = Recent()
        self.access_log = _json_log(
            config.telemetry.access_log, "access log", self.metrics.access_log_dropped.inc
        )
        self.engine = SGLang()
        self.renderer = PromptRenderer(tokenizer)
        self.upstream = Upstream(config.timeouts)
        self.mirror = Mirror(config.session.mirror_records)
        store = SessionStore(self.redis, self.mirror, config.session.ttl_seconds)
        self.turns = Turns(store, loaded.session_keys, self.engine.cache_fields)
        self.admission = Admission(config.limits.max_queued)
        in_flight = config.limits.max_in_flight_per_replica
        self.pools = {name: EnginePool(name, in_flight, self.admission) for name in Pool}
        for name, pool in self.pools.items():
            pool.other = self.pools[name.other]
        self.learning = SharedLearning(self.redis)
        self.retry_budget = RetryBudget()
        self.fatal_requests = FatalRequests()
        self.bodies = BodyBudget()
        self.draining = False
        self._ready_without_engines = False
        self.tls: ssl.SSLContext | None = None
        """The context to listen with. Each handshake uses the newest certificate. None if the port has no TLS."""
        if loaded.certificate is not None:
            self.tls = _server_context()
            self.tls.sni_callback = self._use_certificate
        self.key_limits = KeyLimits()
        self.policy = loaded.policy
        self.configured_at = time.time()
        """When the configuration in use was loaded, in seconds since the Unix epoch."""
        self.config_error: str | None = None
        """Why the newest configuration is not in use; None if it is."""
        self._use(config, loaded)

    def in_effect(self, config: GatewayConfig) -> GatewayConfig:
        """A reloaded configuration with the values that a reload does not apply replaced by those in use."""
        in_use = self.config
        changes: dict[str, Any] = {name: getattr(in_use, name) for name in (*FIXED_SECTIONS, "config_map")}
        for key in _FIXED_KEYS:
            section, _, name = key.partition(".")
            reloaded = changes.get(section, getattr(config, section))
            changes[section] = reloaded.model_copy(update={name: attrgetter(key)(in_use)})
        pools = {pool.value: _located(config.pools[pool], in_use.pools[pool]) for pool in Pool}
        return config.model_copy(update={**changes, "pools": Pools(**pools)})

    def apply(self, config: GatewayConfig) -> None:
        """Apply a new configuration atomically. Requests in flight are unaffected.

        Raises ConfigError, and changes nothing, if the configuration cannot be used.
        """
        loaded = _Reloadable.load(self.in_effect(config))
        if self.redis is not None and loaded.redis_url is not None and loaded.redis_url != self._redis_url:
            self.redis.use(_client(config, loaded.redis_url))
            self._redis_url = loaded.redis_url
        for key in (*FIXED_SECTIONS, "config_map", *(f"pools.{pool}.service" for pool in Pool), *_FIXED_KEYS):
            if attrgetter(key)(config) != attrgetter(key)(self.config):
                name = ".".join(map(to_camel, key.split(".")))
                log.warning("'%s' has changed; the change takes effect when the gateway restarts", name)
        previous = self.config.routing.model_copy(update={"suspended": config.routing.suspended})
        config = self.in_effect(config)
        if config.routing != previous:  # otherwise, keep what a learning policy has learned
            self.policy = loaded.policy
        self._use(config, loaded)

    def _use(self, config: GatewayConfig, loaded: _Reloadable) -> None:
        """Use a configuration at the start or after a reload, except for the policy."""
        self.config = config
        self._certificate = loaded.certificate
        self.keys = loaded.keys
        self.admin_token = loaded.admin_token
        """The token that requests for sessions on the admin port must contain, or None if they are not protected."""
        self.turns.keys = loaded.session_keys
        self.turns.common_prefix_cache = config.routing.common_prefix_cache
        self.turns.store.ttl_seconds = config.session.ttl_seconds
        self.upstream.timeouts = config.timeouts
        waits = config.timeouts.wake_seconds is not None and not config.routing.suspended
        self.admission.max_queued = config.limits.max_queued
        self.admission.holding = waits
        self._ready_without_engines |= waits or config.routing.suspended
        for name, pool in self.pools.items():
            pool.configure(
                config.limits.max_in_flight_per_replica,
                loaded.engine_keys[name],
                loaded.trust[name],
                config.timeouts.slow_start_seconds,
            )
            if endpoints := config.pools[name].endpoints:  # those of a Service come from discovery
                pool.set_endpoints(endpoints)

    def reload(self, source: ConfigFile) -> bool:
        """Load and apply the configuration. If it is invalid, keep the current configuration and return False."""
        try:
            self.apply(source.load(self.in_effect))
        except ConfigError as error:
            log.error("configuration not reloaded, the previous one stays in use: %s", error)
            self.metrics.config_reloads.labels("refused").inc()
            self.metrics.config_valid.set(0)
            self.config_error = str(error)
            return False
        log.info("configuration reloaded")
        self.metrics.config_reloads.labels("applied").inc()
        self.metrics.config_valid.set(1)
        self.configured_at, self.config_error = time.time(), None
        return True

    def _use_certificate(
        self, connection: ssl.SSLSocket | ssl.SSLObject, server_name: str | None, context: ssl.SSLContext
    ) -> None:
        """Use the newest certificate. OpenSSL calls this for every handshake, also for those without a server name."""
        if self._certificate is not None:
            connection.context = self._certificate

    @property
    def ready(self) -> bool:
        """Whether this gateway replica should receive requests: it is not draining, and an engine has answered it.

        It needs no engine if requests wait for one, or if all requests are answered with an error that states the
        reason. Once ready, it stays ready without engines, so that clients receive such an error instead of a refused
        connection.
        """
        answered = any(pool.has_answered for pool in self.pools.values())
        return (answered or self._ready_without_engines) and not self.draining

    def refresh_gauges(self) -> None:
        """Update the metrics that show current state."""
        for name, pool in self.pools.items():
            self.metrics.in_flight.labels(name.value).set(pool.in_flight)
            self.metrics.queued.labels(name.value).set(pool.queued)
            self.metrics.demand.labels(name.value).set(pool.in_flight + pool.queued)
            self.metrics.ready_replicas.labels(name.value).set(len(pool.ready))
        self.metrics.buffered_bytes.set(self.bodies.used)
        self.metrics.state_degraded.set(self.redis is not None and self.redis.degraded)

    @property
    def separates_tenants(self) -> bool:
        """Whether there are several tenants, which must not read each other's cached tokens."""
        return self.config.auth.isolate_cache and self.has_several_tenants

    @property
    def has_several_tenants(self) -> bool:
        """Whether there are API keys of more than one tenant."""
        return self.keys is not None and len(self.keys.tenants) > 1

    def cache_salt(self, tenant: str) -> CacheSalt | None:
        """The salts that separate the tenant's KV cache from those of other tenants. None if they share it."""
        if self.keys is None or not self.config.auth.isolate_cache:
            return None
        return CacheSalt(self.keys.secret(tenant))

    def scope(self, tenant: str) -> Scope:
        """The scope that separates the tenant's sessions from those of other tenants."""
        return _scope(self.config.model.name, tenant, self.config.session.scope)

    async def close(self) -> None:
        """Close all connections and flush spans."""
        await self.upstream.close()
        if self.redis is not None:
            await self.redis.close()
        for entries in (self.decision_log, self.access_log):
            if entries is not None:
                await entries.flush()
        self.tracing.shutdown()


def _located(pool: PoolConfig, in_use: PoolConfig) -> PoolConfig:
    """The pool of a reloaded configuration. A list of endpoints is replaced only by another one, because discovery is
    started with the gateway."""
    if pool.endpoints and in_use.endpoints:
        return pool
    return pool.model_copy(update={"endpoints": in_use.endpoints, "service": in_use.service})


_scope = lru_cache(maxsize=1024)(Scope.of)


def _client(config: GatewayConfig, url: str) -> Client:
    """Raises ConfigError if the URL is invalid."""
    try:
        return connect(url, config.session.redis_timeout_seconds)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _json_log(path: Path | None, name: str, on_dropped: Callable[[int], None]) -> JsonLog | None:
    return None if path is None else JsonLog(path, on_dropped, name=name)


def _certificate(files: TlsFiles) -> ssl.SSLContext:
    """A context with the certificate. Raises ConfigError if it cannot be used."""
    context = _server_context()
    try:
        context.load_cert_chain(files.cert_file, files.key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"listen.tls: the certificate {files.cert_file} and the key {files.key_file} cannot be used: "
            f"{_reason(error)}"
        ) from error
    return context


def _trust(ca_file: Path | None, key: str) -> ssl.SSLContext | bool:
    """The `ssl` argument for requests to servers with certificates from these authorities; True for the system's.

    `key` of the configuration names the file. Raises ConfigError if it cannot be used.
    """
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{key}: the certificates in {ca_file} cannot be used: {_reason(error)}") from error


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
