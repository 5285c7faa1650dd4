"""What the request handlers share: everything that a configuration turns into, and what of it can change."""

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

from dps_gateway.auth import Keys
from dps_gateway.config import ConfigError, GatewayConfig
from dps_gateway.pool import Pool
from dps_gateway.prompt.accounting import Accountant
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.routing.decision import Policy
from dps_gateway.session.identity import Scope, parse_session_key
from dps_gateway.session.mirror import Mirror
from dps_gateway.session.peers import HttpPeers
from dps_gateway.session.redis import RedisBackend, connect
from dps_gateway.session.store import SessionStore
from dps_gateway.telemetry.metrics import Metrics
from dps_gateway.telemetry.tracing import Tracing
from dps_gateway.turn import Turns
from dps_gateway.upstream.exchange import Upstream
from dps_gateway.upstream.pool import EnginePool

log = logging.getLogger(__name__)

FIXED_SECTIONS: Final = ("listen", "model", "telemetry")
"""Sections that are read once: a change takes effect at the next start."""


class Runtime:
    """The gateway's parts, wired. Construct it inside a running event loop."""

    def __init__(self, config: GatewayConfig, tokenizer: Tokenizer) -> None:
        self.metrics = Metrics()
        self.tracing = Tracing(config.telemetry)
        self.accountant = Accountant(tokenizer)
        self.upstream = Upstream(config.timeouts)
        self.redis = _redis(config, self._count_state_error)
        session = config.session
        self.mirror = Mirror(session.mirror_records)
        self.peers = HttpPeers() if session.peers is not None else None
        store = SessionStore(self.redis, self.mirror, session.ttl_seconds, self.peers)
        self.turns = Turns(store, ())
        self.pools = {pool: EnginePool(pool, 1, 0) for pool in Pool}
        self.draining = False
        self.config: GatewayConfig
        self.policy: Policy
        self.keys: Keys | None
        self._started_with = config
        self.apply(config)

    def apply(self, config: GatewayConfig) -> None:
        """Take on a configuration, wholly or, if it raises ConfigError, not at all. Running requests go on."""
        for section in FIXED_SECTIONS:
            if getattr(config, section) != getattr(self._started_with, section):
                log.warning("the change of '%s' takes effect at the next start", section)
        keys = Keys.load(config.auth.keys_file) if config.auth.keys_file else None
        api_keys = {pool: _api_key(config, pool) for pool in Pool}
        self.config = config
        self.keys = keys
        self.policy = config.routing.build()
        self.turns.keys = tuple(parse_session_key(key) for key in config.session.keys)
        self.turns.store.ttl_seconds = config.session.ttl_seconds
        self.upstream.configure(config.timeouts)
        if self.peers is not None and config.session.peers is not None and config.session.peers.endpoints:
            self.peers.set_endpoints(config.session.peers.endpoints)
        for name, pool in self.pools.items():
            pool.max_in_flight_per_replica = config.limits.max_in_flight_per_replica
            pool.max_queued = config.limits.max_queued
            pool.api_key = api_keys[name]
            if config.pools[name].endpoints:
                pool.set_endpoints(config.pools[name].endpoints)

    @property
    def ready(self) -> bool:
        """Whether this replica should get requests: it is not going away, and an engine has answered it."""
        seen = any(replica.seen_ready for pool in self.pools.values() for replica in pool.replicas.values())
        return seen and not self.draining

    def refresh_gauges(self) -> None:
        """Bring the metrics that show a present state up to date."""
        for name, pool in self.pools.items():
            self.metrics.in_flight.labels(name.value).set(pool.in_flight)
            self.metrics.queued.labels(name.value).set(pool.queued)
            self.metrics.ready_replicas.labels(name.value).set(len(pool.ready))
        self.metrics.state_degraded.set(self.redis is not None and self.redis.degraded)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Whose request it is; one nameless tenant where no keys are configured. Raises Unauthorized."""
        return self.keys.tenant(headers) if self.keys is not None else ""

    def scope(self, tenant: str) -> Scope:
        """Where the tenant's sessions are kept apart from others'."""
        return _scope(self.config.model.name, tenant)

    async def close(self) -> None:
        """Let go of connections and flush spans."""
        await self.upstream.close()
        if self.peers is not None:
            await self.peers.close()
        if self.redis is not None:
            await self.redis.close()
        self.tracing.shutdown()

    def _count_state_error(self, kind: str) -> None:
        self.metrics.state_errors.labels(kind).inc()


_scope = lru_cache(maxsize=1024)(Scope.of)


def _redis(config: GatewayConfig, on_error: Callable[[str], None]) -> RedisBackend | None:
    session = config.session
    if session.redis_url is None:
        return None
    try:
        client = connect(session.redis_url, session.redis_timeout_seconds)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return RedisBackend(client, session.redis_timeout_seconds, on_error)


def _api_key(config: GatewayConfig, pool: Pool) -> str | None:
    path = config.pools[pool].api_key_file
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"pools.{pool}.apiKeyFile: {path} cannot be read: {error.strerror}") from error
