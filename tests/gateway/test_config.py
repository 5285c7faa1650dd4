"""The configuration file: defaults, validation, and error messages."""

from pathlib import Path

import pytest

from dps_gateway.config import ConfigError, GatewayConfig, load_config, parse_config
from dps_gateway.pool import Pool
from dps_gateway.routing.policies import DeltaPrefill

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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping with the keys 'model' and 'pools'"),
        ("- x", "expected a mapping with the keys 'model' and 'pools'"),
        ("a: [", "invalid YAML"),
        ("model: {name: m, tokenizer: t}", "pools: missing"),
        (
            MINIMAL.replace("endpoints: [http://a:1]", ""),
            "pools.speculative: set exactly one of 'endpoints' and",
        ),
        (MINIMAL.replace("http://a:1", "a:1"), "'a:1' is not an HTTP URL: use http://HOST:PORT"),
        (
            MINIMAL.replace("{name: m", "{volatilePrompt: ['('], name: m"),
            "model.volatilePrompt.0: .*regular exp",
        ),
        (f"{MINIMAL}rooting: {{}}", "rooting: unknown key"),
        (
            f"{MINIMAL}routing: {{tau: 1}}\nlisten: {{prot: 1}}",
            "listen.prot: unknown key; routing.tau: unknown key",
        ),
        (
            f"{MINIMAL}routing: {{thresholdTokens: -1}}",
            "routing.thresholdTokens: .*greater than or equal to 0",
        ),
        (f"{MINIMAL}routing: {{policy: Fastest}}", "routing.policy: .*choose one of DeltaPrefill, "),
        (f"{MINIMAL}session: {{redisTimeoutSeconds: 0}}", "session.redisTimeoutSeconds: .*greater than 0"),
        (f"{MINIMAL}session: {{keys: [x-id]}}", "session.keys.0: .*write header:NAME or body:FIELD"),
    ],
)
def test_error_names_the_file_and_all_invalid_keys(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"gateway.yaml: .*{message}"):
        parse(text)


def test_environment_variable_overrides_redis_url() -> None:
    config = parse(MINIMAL + "session: {ttlSeconds: 5}", DPS_REDIS_URL="redis://:secret@r")
    assert (config.session.redis_url, config.session.ttl_seconds) == ("redis://:secret@r", 5)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "gateway.yaml")
