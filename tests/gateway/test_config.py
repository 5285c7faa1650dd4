"""The configuration file: defaults, validation, and error messages."""

from pathlib import Path

import pytest
from pydantic.alias_generators import to_camel

from dps_gateway.config import ConfigError, GatewayConfig, Timeouts, load_config, parse_config
from dps_gateway.pool import Pool
from dps_gateway.routing.policies import AlwaysGreedy, DeltaPrefill

MINIMAL = """
model: {name: m, tokenizer: ./tokenizer}
pools:
  speculative: {endpoints: [http://a:1]}
  greedy: {endpoints: [http://b:1/]}
"""


def parse(text: str, **environment: str) -> GatewayConfig:
    return parse_config(text, source="gateway.yaml", environment=environment)


def test_all_keys_but_model_and_pools_have_defaults() -> None:
    config = parse(MINIMAL)
    assert (config.listen.port, config.listen.admin_port) == (8000, 9090)
    assert config.pools[Pool.GREEDY].endpoints == ("http://b:1",)
    assert config.routing.build() == DeltaPrefill(128)
    assert (config.session.ttl_seconds, config.session.redis_timeout_seconds) == (3600, 0.05)


def test_threshold_may_be_null() -> None:
    assert parse(MINIMAL + "routing: {thresholdTokens: null}").routing.build() == DeltaPrefill(None)


def test_policy_is_selected_by_name() -> None:
    assert parse(MINIMAL + "routing: {policy: AlwaysGreedy}").routing.build() == AlwaysGreedy()


@pytest.mark.parametrize(
    ("addition", "message"),
    [
        pytest.param("rooting: {}", "rooting: unknown key", id="unknown section"),
        pytest.param("routing: {tau: 1}", "routing.tau: unknown key", id="unknown key in a section"),
        pytest.param(
            "routing: {thresholdTokens: -1}",
            "routing.thresholdTokens: .*greater than or equal to 0",
            id="τ < 0",
        ),
        pytest.param(
            "routing: {policy: Fastest}",
            "routing.policy: .*choose one of DeltaPrefill, ",
            id="unknown policy",
        ),
        pytest.param(
            "session: {redisTimeoutSeconds: 0}",
            "session.redisTimeoutSeconds: .*greater than 0",
            id="zero timeout",
        ),
        pytest.param(
            "session: {keys: [x-id]}",
            r"session.keys.0: .*write header:NAME or body:FIELD",
            id="malformed session key",
        ),
        pytest.param(
            "session: {keys: ['header:authorization']}",
            "must not identify a session",
            id="credential as session key",
        ),
        pytest.param(
            "listen: {port: 70000}", "listen.port: .*less than or equal to 65535", id="port out of range"
        ),
        pytest.param(
            "limits: {maxBodyBytes: big}", "limits.maxBodyBytes: .*valid integer", id="not a number"
        ),
        pytest.param(
            "listen: {workers: 4}\nlimits: {maxConnections: 3}",
            "limits.maxConnections must be at least listen.workers",
            id="fewer connections than workers",
        ),
        pytest.param(
            "telemetry: {sampleRatio: 2}", "telemetry.sampleRatio: .*less than or equal to 1", id="ratio"
        ),
    ],
)
def test_error_names_the_invalid_key(addition: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"gateway.yaml: .*{message}"):
        parse(MINIMAL + addition)


@pytest.mark.parametrize("key", [to_camel(name) for name in Timeouts.model_fields])
@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_timeouts_must_be_finite(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"gateway.yaml: timeouts.{key}: "):
        parse(MINIMAL + f"timeouts: {{{key}: {value}}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "expected a mapping with the keys 'model' and 'pools'", id="empty"),
        pytest.param("- x", "expected a mapping with the keys 'model' and 'pools'", id="a list"),
        pytest.param("a: [", "invalid YAML", id="invalid YAML"),
        pytest.param("model: {name: m, tokenizer: t}", "pools: missing", id="no pools"),
        pytest.param(
            MINIMAL.replace("endpoints: [http://a:1]", ""),
            "pools.speculative: set exactly one of 'endpoints' and 'service'",
            id="pool without servers",
        ),
        pytest.param(
            MINIMAL.replace("http://a:1", "a:1"),
            "'a:1' is not an HTTP URL: use http://HOST:PORT",
            id="not a URL",
        ),
    ],
)
def test_invalid_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_error_names_all_invalid_keys() -> None:
    with pytest.raises(ConfigError) as error:
        parse(MINIMAL + "routing: {tau: 1}\nlisten: {prot: 1}")
    assert "routing.tau: unknown key" in str(error.value)
    assert "listen.prot: unknown key" in str(error.value)


def test_environment_variable_overrides_redis_url() -> None:
    config = parse(MINIMAL + "session: {ttlSeconds: 5}", DPS_REDIS_URL="redis://:secret@r")
    assert (config.session.redis_url, config.session.ttl_seconds) == ("redis://:secret@r", 5)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "gateway.yaml")
