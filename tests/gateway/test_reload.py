"""Reloading the configuration and the files that it names."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from multidict import CIMultiDict
from redis.asyncio import Redis

from dps_gateway.app import receive_config
from dps_gateway.auth import Unauthorized
from dps_gateway.config import ConfigError, ConfigFile, load_config
from dps_gateway.pool import Pool
from dps_gateway.runtime import Runtime
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
def source(file: Path) -> ConfigFile:
    return ConfigFile(file)


@pytest.fixture
async def runtime(source: ConfigFile) -> AsyncIterator[Runtime]:
    runtime = Runtime(source.load(), shared_tokenizer())
    yield runtime
    await runtime.close()


def tenant(runtime: Runtime, key: str) -> str:
    """The tenant of a request with an API key."""
    assert runtime.keys is not None
    return runtime.keys.key(CIMultiDict({"Authorization": f"Bearer {key}"})).tenant


async def test_new_content_of_files_with_keys_replaces_the_keys(source: ConfigFile, runtime: Runtime) -> None:
    assert runtime.pools[Pool.SPECULATIVE].api_key == "engine-old"
    for name, content in (("keys", "team:sk-new"), ("engine-key", "engine-new")):
        assert not source.changed()
        write(name, content)
        assert source.changed()
        assert runtime.reload(source)
    assert tenant(runtime, "sk-new") == "team"
    with pytest.raises(Unauthorized):
        tenant(runtime, "sk-old")
    assert runtime.pools[Pool.SPECULATIVE].api_key == "engine-new"


@pytest.mark.parametrize(
    "name",
    ["gateway.yaml", "keys", "redis-url", "admin-token", "engine-key", "engine-ca", "tls-cert", "tls-key"],
)
def test_every_file_that_the_configuration_names_is_watched(source: ConfigFile, name: str) -> None:
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


async def test_file_that_is_being_replaced_counts_as_unchanged(source: ConfigFile, runtime: Runtime) -> None:
    remove("keys")
    assert not source.changed()
    write("keys", "team:sk-old")
    assert not source.changed()


@pytest.mark.parametrize("name", ["keys", "new-keys"])
async def test_refused_configuration_is_applied_once_its_file_is_valid(
    source: ConfigFile, runtime: Runtime, name: str
) -> None:
    if name == "keys":
        write("keys", "no colon")
    write("gateway.yaml", CONFIG.replace("keysFile: keys", f"keysFile: {name}"))
    assert source.changed()
    assert not runtime.reload(source)
    assert not source.changed()
    write(name, "team:sk-new")
    assert source.changed()
    assert runtime.reload(source)
    assert tenant(runtime, "sk-new") == "team"
    assert not source.changed()


async def test_invalid_utf8_is_refused_and_the_next_valid_file_applied(file: Path, runtime: Runtime) -> None:
    write("gateway.yaml", b"\xff" + CONFIG.encode())
    assert not runtime.reload(ConfigFile(file))
    assert runtime.metrics.registry.get_sample_value("dps_config_valid") == 0
    write("gateway.yaml", CONFIG + "routing: {thresholdTokens: 7}")
    assert runtime.reload(ConfigFile(file))
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


async def test_change_that_needs_a_restart_is_logged(
    file: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    write("gateway.yaml", CONFIG + "session: {redisUrl: 'redis://127.0.0.1:1'}\ntimeouts: {drainSeconds: 7}")
    assert runtime.reload(ConfigFile(file))
    logged = [record.getMessage() for record in caplog.records]
    for key in ("session.redisUrl", "timeouts.drainSeconds"):
        assert f"'{key}' has changed; the change takes effect when the gateway restarts" in logged


async def test_new_endpoints_are_reloaded(source: ConfigFile, runtime: Runtime) -> None:
    write("gateway.yaml", CONFIG.replace("127.0.0.1:1", "127.0.0.1:2"))
    assert runtime.reload(source)
    assert [list(pool.replicas) for pool in runtime.pools.values()] == [["http://127.0.0.1:2"]] * 2
    assert runtime.config.pools.greedy.endpoints == ("http://127.0.0.1:2",)


async def test_reload_keeps_the_replicas_of_a_service(file: Path) -> None:
    service = "{service: {name: s, namespace: n, port: 1}}"
    write("gateway.yaml", CONFIG.replace("{endpoints: ['http://127.0.0.1:1']}", service))
    runtime = Runtime(load_config(file), shared_tokenizer())
    runtime.pools[Pool.GREEDY].set_endpoints(["http://found"])
    assert runtime.reload(ConfigFile(file))
    assert list(runtime.pools[Pool.GREEDY].replicas) == ["http://found"]
    await runtime.close()


async def test_new_content_of_the_file_with_the_redis_url_is_used(file: Path) -> None:
    write("redis-url", "redis://:old@127.0.0.1:1/0\n")
    write("gateway.yaml", CONFIG + "session: {redisUrl: 'redis://overridden', redisUrlFile: redis-url}")
    source = ConfigFile(file)
    runtime = Runtime(source.load(), shared_tokenizer())
    assert runtime.redis is not None
    before = runtime.redis.client
    assert runtime.reload(source)
    assert runtime.redis.client is before
    write("redis-url", "redis://:new@127.0.0.1:2/0")
    assert source.changed()
    assert runtime.reload(source)
    assert isinstance(runtime.redis.client, Redis)
    assert runtime.redis.client.connection_pool.connection_kwargs["password"] == "new"
    write("redis-url", "http://127.0.0.1:2")
    assert not runtime.reload(ConfigFile(file))
    await runtime.close()


def with_threshold(tokens: int) -> str:
    return CONFIG + f"routing: {{thresholdTokens: {tokens}}}"


async def test_content_of_the_config_map_is_used_until_the_kubelet_updates_the_file(
    file: Path, runtime: Runtime
) -> None:
    source = ConfigFile(file)

    def threshold_after(reload: bool = True) -> int | None:
        assert not reload or runtime.reload(source)
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


async def test_invalid_content_of_the_config_map_is_refused(
    file: Path, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    receive_config(with_threshold(-1), ConfigFile(file), runtime)
    assert "routing.thresholdTokens" in caplog.text
    assert runtime.metrics.registry.get_sample_value("dps_config_valid") == 0
    assert runtime.config.routing.threshold_tokens == 128
