"""The configuration file: what is optional, what is refused, and how the refusal reads."""

from pathlib import Path

import pytest

from dps_gateway.config import ConfigError, GatewayConfig, load_config, parse_config
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


def test_everything_but_model_and_pools_has_a_default() -> None:
    config = parse(MINIMAL)
    assert (config.listen.port, config.listen.admin_port) == (8000, 9090)
    assert config.pools[Pool.GREEDY].endpoints == ("http://b:1",)
    assert config.routing.build() == DeltaPrefill(128)
    assert (config.session.ttl_seconds, config.session.redis_timeout_seconds) == (3600, 0.05)


def test_null_threshold_is_all_speculative() -> None:
    assert parse(MINIMAL + "routing: {thresholdTokens: null}").routing.build() == DeltaPrefill(None)


def test_a_policy_by_name() -> None:
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
            "session: {redisTimeoutSeconds: 0}", "session.redisTimeoutSeconds: .*greater than 0", id="no time"
        ),
        pytest.param(
            "session: {keys: [x-id]}", r"session.keys.0: .*write header:NAME or body:FIELD", id="bad key"
        ),
        pytest.param(
            "session: {keys: ['header:authorization']}", "must not identify a session", id="a credential"
        ),
        pytest.param(
            "listen: {port: 70000}", "listen.port: .*less than or equal to 65535", id="no such port"
        ),
        pytest.param(
            "limits: {maxBodyBytes: big}", "limits.maxBodyBytes: .*valid integer", id="not a number"
        ),
        pytest.param(
            "telemetry: {sampleRatio: 2}", "telemetry.sampleRatio: .*less than or equal to 1", id="ratio"
        ),
    ],
)
def test_a_wrong_key_is_named(addition: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"gateway.yaml: .*{message}"):
        parse(MINIMAL + addition)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "a mapping with the keys model and pools is expected", id="empty"),
        pytest.param("- x", "a mapping with the keys model and pools is expected", id="a list"),
        pytest.param("a: [", "not YAML", id="not YAML"),
        pytest.param("model: {name: m, tokenizer: t}", "pools: missing", id="no pools"),
        pytest.param(
            MINIMAL.replace("endpoints: [http://a:1]", ""),
            "pools.speculative: give either 'endpoints' or 'service'",
            id="a pool without replicas",
        ),
        pytest.param(
            MINIMAL.replace("http://a:1", "a:1"), "'a:1' is not a URL: write http://HOST:PORT", id="no URL"
        ),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(text)


def test_all_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse(MINIMAL + "routing: {tau: 1}\nlisten: {prot: 1}")
    assert "routing.tau: unknown key" in str(error.value)
    assert "listen.prot: unknown key" in str(error.value)


def test_the_environment_holds_the_url_with_the_password() -> None:
    config = parse(MINIMAL + "session: {ttlSeconds: 5}", DPS_REDIS_URL="redis://:secret@r")
    assert (config.session.redis_url, config.session.ttl_seconds) == ("redis://:secret@r", 5)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "gateway.yaml")
