"""Reloading the configuration and the files that it names."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from multidict import CIMultiDict
from redis.asyncio import Redis

from dps_gateway.auth import Unauthorized
from dps_gateway.config import ConfigError, load_config
from dps_gateway.pool import Pool
from dps_gateway.reload import Source, receive_config, reload_config
from dps_gateway.runtime import Runtime
from dps_testkit.certificates import certify
from dps_testkit.tokenizers import shared_tokenizer

CONFIG = """
model: {name: m, tokenizer: x}
pools:
  speculative: {endpoints: ['http://127.0.0.1:1'], apiKeyFile: engine-key}
  greedy: {endpoints: ['http://127.0.0.1:1']}
auth: {keysFile: keys}
"""


def write(name: str, content: str | bytes) -> None:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(name: str) -> None:
    Path(name).unlink()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("team:sk-old")
    (tmp_path / "engine-key").write_text("engine-old\n")
    (tmp_path / "gateway.yaml").write_text(CONFIG)
    return tmp_path / "gateway.yaml"


@pytest.fixture
def source(file: Path) -> Source:
    return Source(file)


@pytest.fixture
async def runtime(source: Source) -> AsyncIterator[Runtime]:
    runtime = Runtime(source.load(), shared_tokenizer())
    yield runtime
    await runtime.close()


def tenant(runtime: Runtime, key: str) -> str:
    """The tenant of a request with an API key."""
    found = runtime.key(CIMultiDict({"Authorization": f"Bearer {key}"}))
    assert found is not None
    return found.tenant


async def test_new_content_of_the_keys_file_replaces_the_keys(source: Source, runtime: Runtime) -> None:
    assert not source.changed()
    write("keys", "team:sk-new")
    assert source.changed()
    assert reload_config(source, runtime)
    assert tenant(runtime, "sk-new") == "team"
    with pytest.raises(Unauthorized):
        tenant(runtime, "sk-old")
    assert not source.changed()


async def test_new_content_of_an_api_key_file_replaces_the_engines_key(
    source: Source, runtime: Runtime
) -> None:
    assert runtime.pools[Pool.SPECULATIVE].api_key == "engine-old"
    write("engine-key", "engine-new")
    assert source.changed()
    assert reload_config(source, runtime)
    assert runtime.pools[Pool.SPECULATIVE].api_key == "engine-new"


@pytest.mark.parametrize(
    "name",
    ["gateway.yaml", "keys", "redis-url", "admin-token", "engine-key", "engine-ca", "tls-cert", "tls-key"],
)
def test_every_file_that_the_configuration_names_is_watched(source: Source, name: str) -> None:
    greedy = "{endpoints: ['https://engine:1'], apiKeyFile: engine-key, caFile: engine-ca}"
    listen = "listen: {tls: {certFile: tls-cert, keyFile: tls-key}, adminTokenFile: admin-token}\n"
    content = CONFIG.replace("{endpoints: ['http://127.0.0.1:1']}", greedy) + listen
    content += "session: {redisUrlFile: redis-url}\n"
    write("gateway.yaml", content)
    if name != "gateway.yaml":
        write(name, "old")
    source.load()
    assert not source.changed()
    write(name, content + "# new")
    assert source.changed()


async def test_file_that_is_being_replaced_counts_as_unchanged(source: Source, runtime: Runtime) -> None:
    remove("keys")
    assert not source.changed()
    write("keys", "team:sk-old")
    assert not source.changed()


@pytest.mark.parametrize("name", ["keys", "new-keys"])
async def test_refused_configuration_is_applied_once_its_file_is_valid(
    source: Source, runtime: Runtime, name: str
) -> None:
    if name == "keys":
        write("keys", "no colon")
    write("gateway.yaml", CONFIG.replace("keysFile: keys", f"keysFile: {name}"))
    assert source.changed()
    assert not reload_config(source, runtime)
    assert not source.changed()
    write(name, "team:sk-new")
    assert source.changed()
    assert reload_config(source, runtime)
    assert tenant(runtime, "sk-new") == "team"
    assert not source.changed()


async def test_change_while_the_files_are_being_loaded_is_detected(source: Source) -> None:
    config = source.load()
    write("keys", "team:sk-new")
    runtime = Runtime(config, shared_tokenizer())
    assert source.changed()
    await runtime.close()


async def test_files_in_use_are_watched_if_others_are_used_only_after_a_restart(source: Source) -> None:
    certify(Path("one.crt"), Path("one.key"))
    tls = "listen: {{tls: {{certFile: {0}.crt, keyFile: {0}.key}}}}"
    write("gateway.yaml", CONFIG + tls.format("one"))
    runtime = Runtime(source.load(), shared_tokenizer())
    write("gateway.yaml", CONFIG + tls.format("two"))
    assert reload_config(source, runtime)
    certify(Path("one.crt"), Path("one.key"))
    assert source.changed()
    await runtime.close()


async def test_invalid_utf8_is_refused_and_the_next_valid_file_applied(file: Path, runtime: Runtime) -> None:
    write("gateway.yaml", b"\xff" + CONFIG.encode())
    assert not reload_config(Source(file), runtime)
    assert runtime.metrics.registry.get_sample_value("dps_config_valid") == 0
    write("gateway.yaml", CONFIG + "routing: {thresholdTokens: 7}")
    assert reload_config(Source(file), runtime)
    assert runtime.config.routing.threshold_tokens == 7
    assert runtime.metrics.registry.get_sample_value("dps_config_valid") == 1


@pytest.mark.parametrize("content", ["", "two\nlines", "not\x01printable", "ümlaut"])
async def test_api_key_that_cannot_be_sent_in_a_header_is_refused(
    file: Path, runtime: Runtime, content: str
) -> None:
    write("engine-key", content)
    with pytest.raises(ConfigError, match=r"apiKeyFile: engine-key must contain a single line") as error:
        runtime.apply(load_config(file))
    assert not content or content not in str(error.value)
    assert runtime.pools[Pool.SPECULATIVE].api_key == "engine-old"


async def test_invalid_keys_file_leaves_everything_unchanged(file: Path, runtime: Runtime) -> None:
    before = runtime.config
    write("keys", "no colon")
    write("gateway.yaml", CONFIG + "routing: {thresholdTokens: 7}")
    with pytest.raises(ConfigError, match="line 1 is not of the form TENANT:KEY"):
        runtime.apply(load_config(file))
    assert runtime.config is before
    assert tenant(runtime, "sk-old") == "team"


async def test_change_that_needs_a_restart_is_logged(
    file: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    write("gateway.yaml", CONFIG + "session: {redisUrl: 'redis://127.0.0.1:1'}\ntimeouts: {drainSeconds: 7}")
    assert reload_config(Source(file), runtime)
    logged = [record.getMessage() for record in caplog.records]
    for key in ("session.redisUrl", "timeouts.drainSeconds"):
        assert f"'{key}' has changed; the change takes effect when the gateway restarts" in logged


async def test_reloaded_configuration_shows_the_values_in_effect(file: Path, runtime: Runtime) -> None:
    new = (
        CONFIG.replace("{name: m", "{name: other")
        + "session: {redisUrl: 'redis://127.0.0.1:1', ttlSeconds: 7}"
    )
    write("gateway.yaml", new + "\ntimeouts: {drainSeconds: 7, queueSeconds: 7}")
    before = runtime.config
    assert reload_config(Source(file), runtime)
    after = runtime.config
    assert (after.model, after.session.redis_url) == (before.model, None)
    assert after.timeouts.drain_seconds == before.timeouts.drain_seconds
    assert (after.session.ttl_seconds, after.timeouts.queue_seconds) == (7, 7)


SERVICE = "{service: {name: engines, namespace: default, port: 30000}}"
ENDPOINTS = "{endpoints: ['http://127.0.0.1:1']}"


@pytest.mark.parametrize(
    ("started", "reloaded"), [(SERVICE, ENDPOINTS), (ENDPOINTS, SERVICE)], ids=["endpoints", "service"]
)
async def test_change_between_endpoints_and_a_service_has_no_effect_before_a_restart(
    source: Source, caplog: pytest.LogCaptureFixture, started: str, reloaded: str
) -> None:
    def configure(servers: str) -> None:
        pools = CONFIG.replace(f"greedy: {ENDPOINTS}", f"greedy: {servers}")
        write("gateway.yaml", pools + f"session: {{peers: {servers}}}")

    configure(started)
    runtime = Runtime(source.load(), shared_tokenizer())
    engines, before = runtime.pools[Pool.GREEDY], runtime.config
    engines.set_endpoints(["http://found"])
    configure(reloaded)
    assert reload_config(source, runtime)
    assert runtime.config.pools == before.pools
    assert runtime.config.session.peers == before.session.peers
    expected = ["http://found"] if started == SERVICE else ["http://127.0.0.1:1"]
    assert list(engines.replicas) == expected
    for key in ("pools.greedy", "session.peers"):
        assert f"'{key}" in caplog.text
    await runtime.close()


async def test_new_endpoints_are_reloaded(source: Source, runtime: Runtime) -> None:
    write("gateway.yaml", CONFIG.replace("127.0.0.1:1", "127.0.0.1:2"))
    assert reload_config(source, runtime)
    assert [list(pool.replicas) for pool in runtime.pools.values()] == [["http://127.0.0.1:2"]] * 2
    assert runtime.config.pools.greedy.endpoints == ("http://127.0.0.1:2",)


async def test_limits_are_reloaded(file: Path) -> None:
    write("gateway.yaml", CONFIG + "limits: {maxInFlightPerReplica: 10, maxQueued: 2}")
    runtime = Runtime(load_config(file), shared_tokenizer())
    assert [pool.max_in_flight_per_replica for pool in runtime.pools.values()] == [10, 10]
    assert runtime.admission.max_queued == 2
    write("gateway.yaml", CONFIG + "limits: {maxInFlightPerReplica: 8, maxQueued: 0}")
    assert reload_config(Source(file), runtime)
    assert [pool.max_in_flight_per_replica for pool in runtime.pools.values()] == [8, 8]
    assert runtime.admission.max_queued == 0
    await runtime.close()


async def test_new_content_of_the_file_with_the_redis_url_is_used(file: Path) -> None:
    write("redis-url", "redis://:old@127.0.0.1:1/0\n")
    write("gateway.yaml", CONFIG + "session: {redisUrl: 'redis://overridden', redisUrlFile: redis-url}")
    source = Source(file)
    runtime = Runtime(source.load(), shared_tokenizer())
    assert runtime.redis is not None
    before = runtime.redis.client
    assert reload_config(source, runtime)
    assert runtime.redis.client is before
    write("redis-url", "redis://:new@127.0.0.1:2/0")
    assert source.changed()
    assert reload_config(source, runtime)
    assert isinstance(runtime.redis.client, Redis)
    assert runtime.redis.client.connection_pool.connection_kwargs["password"] == "new"
    write("redis-url", "http://127.0.0.1:2")
    assert not reload_config(Source(file), runtime)
    await runtime.close()


def with_threshold(tokens: int) -> str:
    return CONFIG + f"routing: {{thresholdTokens: {tokens}}}"


async def test_content_of_the_config_map_is_used_until_the_kubelet_updates_the_file(
    file: Path, runtime: Runtime
) -> None:
    source = Source(file)

    def threshold_after(reload: bool = True) -> int | None:
        assert not reload or reload_config(source, runtime)
        return runtime.config.routing.threshold_tokens

    receive_config(with_threshold(2), source, runtime)
    assert threshold_after(reload=False) == 2
    receive_config(with_threshold(3), source, runtime)
    assert threshold_after() == 3, "the file has the first content"
    write("gateway.yaml", with_threshold(2))
    assert threshold_after() == 3, "the file has the second content"
    write("gateway.yaml", with_threshold(3))
    assert threshold_after() == 3
    receive_config(with_threshold(2), source, runtime)
    assert threshold_after() == 2, "an earlier content was restored"
    write("gateway.yaml", with_threshold(4))
    assert threshold_after() == 4, "the watch has failed, and the file is newer"


async def test_content_that_is_in_use_is_not_loaded_again(file: Path, runtime: Runtime) -> None:
    receive_config(CONFIG, Source(file), runtime)
    assert (
        runtime.metrics.registry.get_sample_value("dps_config_reloads_total", {"outcome": "applied"}) is None
    )


async def test_invalid_content_of_the_config_map_is_refused(file: Path, runtime: Runtime) -> None:
    receive_config("model: {}", Source(file), runtime)
    assert runtime.metrics.registry.get_sample_value("dps_config_valid") == 0
    assert runtime.config.model.name == "m"
