"""The gateway's configuration file: its schema, its defaults, and errors that name the key."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Policy
from dps_gateway.routing.policies import DeltaPrefill, policy_named
from dps_gateway.session.identity import DEFAULT_SESSION_KEYS, parse_session_key

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]


class ConfigError(Exception):
    """The configuration is invalid. The message names the file, the key and what to change."""


class _Section(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True, strict=False)


def _http_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"'{url}' is not an HTTP URL: use http://HOST:PORT")
    return url.rstrip("/")


def _trace_url(url: str) -> str:
    if not url.startswith(("http://", "https://")) or "{trace}" not in url:
        raise ValueError(f"'{url}' is not an HTTP URL with {{trace}} in place of the trace id")
    return url


def _policy_name(name: str) -> str:
    policy_named(name, None)
    return name


def _session_key(key: str) -> str:
    parse_session_key(key)
    return key


class TlsFiles(_Section):
    cert_file: Path
    """The certificate and its intermediate certificates, in PEM format."""
    key_file: Path


class Listen(_Section):
    host: str = "0.0.0.0"
    port: Port = 8000
    tls: TlsFiles | None = None
    """If null, the public port serves HTTP without TLS."""
    admin_host: str | None = None
    """The address of the admin port. If null, it is `host` in a Kubernetes pod, and 127.0.0.1 elsewhere."""
    admin_port: Port = 9090
    admin_token_file: Path | None = None
    """A file with the token that protects sessions on the admin port. If null, only processes of the same host can
    access them."""
    max_header_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024
    """Maximum size of the request line and of one header. Harnesses send more than the 8 KiB that are usual."""

    def admin_address(self, environment: Mapping[str, str] = os.environ) -> str:
        """The address of the admin port: in a pod, probes and Prometheus must reach it."""
        in_pod = "KUBERNETES_SERVICE_HOST" in environment
        return self.admin_host or (self.host if in_pod else "127.0.0.1")


class Model(_Section):
    name: str
    tokenizer: str
    """A directory that contains tokenizer.json and tokenizer_config.json, or a Hugging Face Hub id."""
    aliases: dict[str, str] = {}
    """Other names for the model, and the names that replace them in requests."""
    strict: bool = True
    """Whether requests for a model that is neither `name`, an adapter of it, nor an alias are refused with 404. If not,
    they are forwarded unchanged; SGLang ignores the name and answers with the model that it serves."""
    revision: str | None = None
    """Branch, tag or commit of a tokenizer on the Hub; its default branch if null."""
    volatile_prompt: tuple[re.Pattern[str], ...] = (re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*"),)
    """Regular expressions whose matches in system prompts are removed, because they change with every request. The
    default matches a header of Claude Code."""


class ServiceRef(_Section):
    name: str
    namespace: str
    port: Port


class PoolConfig(_Section):
    """The servers of a pool: a list of URLs, or a Kubernetes Service."""

    endpoints: tuple[Annotated[str, AfterValidator(_http_url)], ...] = ()
    service: ServiceRef | None = None
    api_key_file: Path | None = None
    ca_file: Path | None = None
    """The certificate authorities that sign the certificates of https:// endpoints. If null, those of the system."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if bool(self.endpoints) == (self.service is not None):
            raise ValueError("set exactly one of 'endpoints' and 'service'")
        if self.ca_file is not None and not any(url.startswith("https://") for url in self.endpoints):
            raise ValueError("'caFile' has no effect: none of 'endpoints' is an https:// URL")
        return self


class Pools(_Section):
    speculative: PoolConfig
    greedy: PoolConfig

    def __getitem__(self, pool: Pool) -> PoolConfig:
        return self.speculative if pool is Pool.SPECULATIVE else self.greedy


class Routing(_Section):
    policy: Annotated[str, AfterValidator(_policy_name)] = "DeltaPrefill"
    threshold_tokens: Annotated[int, Field(ge=0)] | None = 128
    """τ in tokens. With 0 every turn goes to the greedy pool, with null every turn to the speculative pool."""
    min_acceptance: Annotated[float, Field(ge=1)] | None = None
    """For DeltaPrefill: expected tokens per verification that a session needs for the speculative pool."""
    common_prefix_cache: bool = False
    """Whether the engines of both pools share a prefix cache, from which a pool fetches what the other has cached."""
    suspended: bool = False
    """Whether all requests for engines are answered with 503, because the engines are stopped on purpose."""
    decision_log: Path | None = None
    """A file to which every answered turn is appended as one line of JSON. If null, no log is written."""

    @property
    def uses_acceptance(self) -> bool:
        """Whether the policy depends on how many drafts of a session are accepted."""
        return self.policy == "Adaptive" or self.min_acceptance is not None

    def build(self) -> Policy:
        if self.policy == "DeltaPrefill":
            return DeltaPrefill(self.threshold_tokens, self.min_acceptance)
        return policy_named(self.policy, self.threshold_tokens)


class Session(_Section):
    ttl_seconds: Annotated[int, Field(gt=0)] = 3600
    """Time after its last turn for which a session's record is kept."""
    keys: tuple[Annotated[str, AfterValidator(_session_key)], ...] = DEFAULT_SESSION_KEYS
    redis_url: str | None = None
    """redis://, rediss://, redis+sentinel://…?service=NAME or redis+cluster://. If null, sessions
    are kept in memory only."""
    redis_url_file: Path | None = None
    """A file with the URL, which takes precedence. After a change of its content, the gateway connects to the new
    URL."""
    scope: Annotated[str, Field(max_length=512)] = ""
    """Gateways with different scopes share no records, even if they use the same Redis and model name."""
    redis_timeout_seconds: Seconds = 0.05
    """Maximum duration of a call to Redis."""
    mirror_records: Annotated[int, Field(ge=0)] = 50_000
    """Maximum number of records and pointers that this process caches for use while Redis is unavailable."""


class Limits(_Section):
    max_body_bytes: Annotated[int, Field(gt=0)] = 32 * 1024 * 1024
    """Maximum size of one body, decompressed."""
    max_buffered_bytes: Annotated[int, Field(gt=0)] = 256 * 1024 * 1024
    """Maximum total size of the bodies of all requests in progress. The limit is at least `max_body_bytes`. A request
    takes about four times the size of its body in memory, and the operator gives a gateway 2 GiB."""
    min_body_bytes_per_second: Annotated[int, Field(ge=0)] = 500
    """Minimum average rate, in bytes per second, at which a request body must arrive after a grace period of
    30 s; 0 for no minimum. The default is that of Apache's mod_reqtimeout."""
    max_in_flight_per_replica: Annotated[int, Field(gt=0)] = 256
    """Maximum number of requests in flight to one engine replica; further requests wait in the queue. If the engine
    reports a lower limit on running requests, that limit applies."""
    max_queued: Annotated[int, Field(ge=0)] = 1024
    """Maximum number of requests that wait for a free replica. Further requests are answered with 429."""


class Timeouts(_Section):
    body_seconds: Seconds = 300.0
    """Time in which the body of a request must arrive."""
    keep_alive_seconds: Annotated[Seconds, Field(le=3600)] = 3600.0
    """Time for which a client's connection is kept open between requests. Load balancers should close it first."""
    connect_seconds: Seconds = 2.0
    """Maximum time to connect to an engine."""
    first_byte_seconds: Seconds = 600.0
    """Maximum wait for the first byte of a stream, including the engine's own queue and prefill."""
    idle_seconds: Seconds = 120.0
    """Maximum pause within an answer; also the maximum time for which a client may accept no part of its response."""
    total_seconds: Seconds = 3600.0
    """Maximum duration of all attempts of a request together, including waiting in queues and reading the answer; and,
    separately, of sending the response to the client."""
    heartbeat_seconds: SecondsOrZero = 45.0
    """Time without any byte after which a client that has asked for a stream receives a heartbeat; 0 to disable. The
    default is longer than `queue_seconds`, so that a request that is refused there receives the status of the refusal,
    and shorter than the 60 s after which load balancers usually close a silent connection."""
    queue_seconds: Seconds = 30.0
    """Maximum wait in the queue."""
    wake_seconds: Seconds | None = None
    """Time that a request waits while no replica of either pool is ready, for example because both pools are scaled
    to zero. If null, it is answered with 503 immediately."""
    health_interval_seconds: Seconds = 5.0
    """Interval between health checks."""
    silent_seconds: Seconds = 30.0
    """Time without a token from an engine after which its scheduler is checked."""
    slow_start_seconds: SecondsOrZero = 30.0
    """Duration of the slow start in which the share of requests of an engine that joins a pool or returns to service
    grows from a tenth to that of the other engines; 0 to disable."""
    drain_delay_seconds: SecondsOrZero = 5.0
    """Time between reporting not-ready and refusing connections, for endpoint changes to propagate. Requests are
    served meanwhile."""
    drain_seconds: Seconds = 60.0
    """Maximum time in which requests in flight are finished, after new connections are refused."""


class Retries(_Section):
    continue_streams: bool = True
    """Whether another engine continues a stream of plain text whose engine has failed."""


class Auth(_Section):
    keys_file: Path | None = None
    """A file with one TENANT:KEY per line. If null, keys are not checked, and all requests have the same tenant."""
    isolate_cache: bool = True
    """Whether tenants have separate KV caches in the engines. It has no effect without `keys_file`."""


class Telemetry(_Section):
    otlp_endpoint: str | None = None
    protocol: Literal["grpc", "http/protobuf"] = "grpc"
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    service_name: str = "dps-gateway"
    trace_url: Annotated[str, AfterValidator(_trace_url)] | None = None
    """The address of a trace in the tracing backend, with `{trace}` for the trace id, for links on the page."""
    access_log: Path | None = None
    """A file to which every answered request is appended as one line of JSON. If null, no log is written."""


class ConfigMapRef(_Section):
    """The ConfigMap from which the configuration file is mounted, and the file's key in it."""

    name: str
    namespace: str
    key: str = "config.yaml"


class GatewayConfig(_Section):
    """The configuration file. Durations are in seconds, lengths in tokens, sizes in bytes."""

    config_map: ConfigMapRef | None = None
    """If set, changes are read from the API server immediately. The kubelet updates a mounted file within a minute or
    two."""

    listen: Listen = Listen()
    model: Model
    pools: Pools
    routing: Routing = Routing()
    session: Session = Session()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    retries: Retries = Retries()
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
                text = "missing; this key is required"
            case _:
                text = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{key}: {text}")
    return "; ".join(lines)


def parse_config(text: str, *, source: str, environment: Mapping[str, str] = os.environ) -> GatewayConfig:
    """Parse a configuration from YAML text. `source` names it in error messages.

    DPS_REDIS_URL, if set, overrides session.redisUrl, so that a password need not be in the file.
    Raises ConfigError, whose message names every invalid key.
    """
    try:
        data: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: invalid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: expected a mapping with the keys 'model' and 'pools'")
    if url := environment.get("DPS_REDIS_URL"):
        session = data.get("session") or {}
        if not isinstance(session, dict):
            raise ConfigError(f"{source}: session: expected a mapping")
        data = data | {"session": session | {"redisUrl": url}}
    try:
        return GatewayConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error)}") from error


def load_config(path: Path) -> GatewayConfig:
    """Read the configuration file. Raises ConfigError if it cannot be read or is invalid."""
    return parse_config(read_text(path), source=str(path))


def read_text(path: Path, key: str = "") -> str:
    """The content of a file, which `key` of the configuration names. Raises ConfigError if it cannot be read."""
    prefix = f"{key}: " if key else ""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{prefix}{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{prefix}{path} is not UTF-8: invalid byte at offset {error.start}") from error


def read_line(path: Path | None, key: str, what: str) -> str | None:
    """The content of a file that `key` of the configuration names. Raises ConfigError if it is not a single line."""
    if path is None:
        return None
    text = read_text(path, key).strip()
    if not text or not text.isascii() or not text.isprintable():
        raise ConfigError(f"{key}: {path} must contain a single line with one {what} in printable ASCII")
    return text


def current_redis_url(session: Session) -> str | None:
    """The URL of Redis; None without Redis. Raises ConfigError if the file with the URL cannot be used."""
    return read_line(session.redis_url_file, "session.redisUrlFile", "URL") or session.redis_url


def _named_files(config: GatewayConfig) -> Iterator[Path]:
    """The files with keys, tokens and certificates that the configuration names."""
    listen, pools = config.listen, [config.pools[pool] for pool in Pool]
    paths = [config.auth.keys_file, config.session.redis_url_file, listen.admin_token_file]
    paths += [path for pool in pools for path in (pool.api_key_file, pool.ca_file)]
    if listen.tls is not None:
        paths += [listen.tls.cert_file, listen.tls.key_file]
    yield from (path for path in paths if path is not None)


class ConfigFile:
    """The configuration file, or the content of its ConfigMap until the kubelet has updated the file.

    Detects changes in the content of the configuration file and of the files that it names. Modification times are not
    enough: Kubernetes updates a mounted ConfigMap or Secret by swapping a symbolic link.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._newest = ""
        self._superseded: set[str] = set()
        self._loaded: dict[Path, str | None] = {}
        """The digests of the files, as of just before they were last loaded; None for those that could not be read."""

    def load(
        self, in_effect: Callable[[GatewayConfig], GatewayConfig] = lambda config: config
    ) -> GatewayConfig:
        """Load the newest configuration. The caller then loads the files that it names. Raises ConfigError.

        in_effect: returns the configuration that will be used if this one is applied.
        """
        self._loaded = {self.path: _digest(self.path)}
        config = parse_config(self.text(), source=str(self.path))
        self._loaded |= {path: _digest(path) for path in _named_files(in_effect(config))}
        return config

    def changed(self) -> bool:
        """Whether a file has changed since the configuration was last loaded, even if it could not be used.

        A file that cannot be read counts as unchanged, because it may be in the middle of being replaced.
        """
        current = ((_digest(path), loaded) for path, loaded in self._loaded.items())
        return any(digest not in (None, loaded) for digest, loaded in current)

    def receive(self, text: str) -> bool:
        """Use the ConfigMap's current content. False if it is in use. Raises ConfigError as `text` does."""
        current = self.text()
        if text == current:
            return False
        self._superseded |= {current, read_text(self.path)}
        self._newest = text
        return True

    def text(self) -> str:
        """The newest content. Raises ConfigError if the file cannot be read."""
        on_disk = read_text(self.path)
        return self._newest if on_disk in self._superseded else on_disk


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None
