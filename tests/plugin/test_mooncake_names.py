"""The names of an engine's pages in Mooncake while its weights are replaced, without SGLang and torch."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dps_sglang.sharing import TAG, NotShareable, Sharing, flushing, replacing_weights
from tests.plugin.test_plugin_sharing import StorageConfig

ENGINES = pytest.mark.parametrize("problem", ["", "LoRA"], ids=["shares pages", "shares none"])


@pytest.fixture
def open_store(shares: Sharing, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Opens the store of an engine that shares pages, or that has a problem which prevents it.

    The names of its pages begin with the store's `config_prefix`.
    """
    identity: Any = ModuleType("dps_sglang.identity")
    monkeypatch.setitem(sys.modules, identity.__name__, identity)
    monkeypatch.delitem(sys.modules, "dps_sglang.mooncake", raising=False)

    def init(store: Any, config: StorageConfig, _pool: object) -> None:
        assert config.extra_config is not None
        store.config_prefix = config.extra_config[TAG]

    def opened(problem: str) -> Any:
        def pages_digest(*_: object) -> str:
            if problem:
                raise NotShareable(problem)
            return "0" * 64

        identity.pages_digest = pages_digest
        mooncake = importlib.import_module("dps_sglang.mooncake")
        store = SimpleNamespace()
        mooncake.tagged(init, store, StorageConfig(None), SimpleNamespace(kv_buffer=b""))
        return store

    yield opened
    sys.modules.pop("dps_sglang.mooncake", None)


@ENGINES
def test_pages_have_another_name_during_and_after_each_replacement_of_the_weights(
    open_store: Callable[[str], Any], problem: str
) -> None:
    """Pages of the earlier weights may be written until the update has ended."""
    store = open_store(problem)
    names = [store.config_prefix]
    for _ in range(3):
        replacing_weights(lambda _self, _request: names.append(store.config_prefix), None, None)
        names.append(store.config_prefix)
    assert len(set(names)) == len(names) == 7


def flush(*, done: bool) -> None:
    """SGLang is asked to remove the KV in its own memory. done: whether it does."""
    assert flushing(lambda _self, empty_cache: done, None, empty_cache=True) is done


@ENGINES
def test_pages_have_another_name_after_a_flush_if_the_weights_were_replaced_before(
    open_store: Callable[[str], Any], problem: str
) -> None:
    """Until SGLang removes the KV of the earlier weights from its memory, it also stores it in Mooncake."""
    store = open_store(problem)
    replacing_weights(lambda _self, _request: None, None, None)
    name = store.config_prefix
    flush(done=False)
    assert store.config_prefix == name
    flush(done=True)
    assert store.config_prefix != name


@ENGINES
def test_pages_keep_their_name_if_the_weights_are_not_replaced(
    open_store: Callable[[str], Any], problem: str
) -> None:
    store = open_store(problem)
    name = store.config_prefix
    flush(done=True)
    assert store.config_prefix == name
