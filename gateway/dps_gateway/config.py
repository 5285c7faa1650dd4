"""The gateway's configuration file: its schema, its defaults, and errors that name the key."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Policy
from dps_gateway.routing.policies import policy_named
from dps_gateway.session.identity import DEFAULT_SESSION_KEYS, parse_session_key

Seconds = Annotated[float, Field(gt=0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class ConfigError(Exception):
    """The configuration cannot be used; the message names the file, the key and what to change."""


class _Section(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, strict=False)


def _http_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"'{url}' is not a URL: write http://HOST:PORT")
    return url.rstrip("/")


def _policy_name(name: str) -> str:
    policy_named(name, None)
    return name


def _session_key(key: str) -> str:
    parse_session_key(key)
    return key


class Listen(_Section):
    host: str = "0.0.0.0"
    port: Port = 8000
    admin_port: Port = 9090
    workers: Annotated[int, Field(ge=1, le=64)] = 1


class Model(_Section):
    name: str
    tokenizer: str
    """A folder with tokenizer.json and its configuration, or a hub id."""


class ServiceRef(_Section):
    name: str
    namespace: str
    port: Port


class Servers(_Section):
    """Where servers are: a list of URLs, or a Service of the cluster."""

    endpoints: tuple[Annotated[str, AfterValidator(_http_url)], ...] = ()
    service: ServiceRef | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.endpoints) == (self.service is not None):
            raise ValueError("give either 'endpoints' or 'service', not both and not neither")
        return self


class PoolConfig(Servers):
    api_key_file: Path | None = None


class Pools(_Section):
    speculative: PoolConfig
    greedy: PoolConfig

    def __getitem__(self, pool: Pool) -> PoolConfig:
        return self.speculative if pool is Pool.SPECULATIVE else self.greedy


class Routing(_Section):
    policy: Annotated[str, AfterValidator(_policy_name)] = "DeltaPrefill"
    threshold_tokens: Annotated[int, Field(ge=0)] | None = 128
    """τ in tokens: 0 is all greedy, null all speculative."""

    def build(self) -> Policy:
        return policy_named(self.policy, self.threshold_tokens)


class Session(_Section):
    ttl_seconds: Annotated[int, Field(gt=0)] = 3600
    keys: tuple[Annotated[str, AfterValidator(_session_key)], ...] = DEFAULT_SESSION_KEYS
    redis_url: str | None = None
    """redis://, rediss://, redis+sentinel://…?service=NAME or redis+cluster://. None: this process alone."""
    redis_timeout_seconds: Seconds = 0.05
    mirror_records: Annotated[int, Field(ge=0)] = 50_000
    """Sessions remembered in this process for when Redis is away."""
    peers: Servers | None = None
    """The admin ports of all replicas, which then tell each other what they remember."""


class Limits(_Section):
    max_body_bytes: Annotated[int, Field(gt=0)] = 32 * 1024 * 1024
    max_in_flight_per_replica: Annotated[int, Field(gt=0)] = 256
    max_queued: Annotated[int, Field(ge=0)] = 1024
    """Requests that may wait for a pool; the next one is answered 429."""


class Timeouts(_Section):
    connect_seconds: Seconds = 2.0
    first_byte_seconds: Seconds = 600.0
    idle_seconds: Seconds = 120.0
    total_seconds: Seconds = 3600.0
    queue_seconds: Seconds = 30.0
    health_interval_seconds: Seconds = 5.0
    drain_delay_seconds: Annotated[float, Field(ge=0)] = 5.0
    """Between 'not ready' and refusing connections: what endpoint propagation takes. Requests are served."""
    drain_seconds: Seconds = 60.0


class Auth(_Section):
    keys_file: Path | None = None
    """Lines of TENANT:KEY. None: no key is asked for, everybody is one tenant."""


class Telemetry(_Section):
    otlp_endpoint: str | None = None
    protocol: Literal["grpc", "http/protobuf"] = "grpc"
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    service_name: str = "dps-gateway"


class GatewayConfig(_Section):
    """The whole file. Durations are in seconds, lengths in tokens, sizes in bytes."""

    listen: Listen = Listen()
    model: Model
    pools: Pools
    routing: Routing = Routing()
    session: Session = Session()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    auth: Auth = Auth()
    telemetry: Telemetry = Telemetry()


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"]) or "(the file)"
        match problem["type"]:
            case "extra_forbidden":
                text = "unknown key"
            case "missing":
                text = "missing: this key has no default"
            case _:
                text = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{key}: {text}")
    return "; ".join(lines)


def parse_config(text: str, *, source: str, environment: Mapping[str, str] = os.environ) -> GatewayConfig:
    """Read a configuration from YAML text; `source` names it in errors.

    DPS_REDIS_URL, when set, takes the place of session.redisUrl, so that a password can stay in a secret.
    Raises ConfigError, whose message names every key that is wrong.
    """
    try:
        data: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: a mapping with the keys model and pools is expected")
    if url := environment.get("DPS_REDIS_URL"):
        session = data.get("session") or {}
        if not isinstance(session, dict):
            raise ConfigError(f"{source}: session: a mapping is expected")
        data = data | {"session": session | {"redisUrl": url}}
    try:
        return GatewayConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from error


def load_config(path: Path) -> GatewayConfig:
    """Read the configuration file. Raises ConfigError if it is missing or wrong."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return parse_config(text, source=str(path))
