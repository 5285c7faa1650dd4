"""Whether an engine shares pages: what changes it, and the metric that states it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from dps_sglang.metrics import SHARING
from dps_sglang.sharing import (
    REPLACED,
    TAG,
    NotShareable,
    Sharing,
    not_shared,
    refuse_other_storage,
    releasing_weights,
    replacing_weights,
    resetting_weights,
)


def states() -> list[tuple[str, str]]:
    """The pages that the process shares, and why it shares none, as exported."""
    return [
        (sample.labels["pages"], sample.labels["problem"])
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == SHARING and sample.value == 1
    ]


def test_only_the_present_state_of_an_engine_is_exported(
    shares: Sharing, caplog: pytest.LogCaptureFixture
) -> None:
    shares.begin("pages")
    assert states() == [("pages", "")]
    shares.refuse("LoRA")
    assert states() == [("", "LoRA")]
    assert caplog.messages == ["dps prefix cache: not shared: LoRA"]


def test_engine_whose_weights_are_replaced_shares_no_pages_any_more(shares: Sharing) -> None:
    shares.begin("pages")

    request = SimpleNamespace()
    assert replacing_weights(lambda _self, given: given, None, request) is request

    assert states() == [("", REPLACED)]
    with pytest.raises(NotShareable, match="restart it"):
        shares.begin("pages")


@pytest.mark.parametrize(
    ("hook", "fields", "ends"),
    [
        pytest.param(resetting_weights, {"action": "reset_tensors"}, True, id="reset"),
        pytest.param(resetting_weights, {"action": "checksum"}, False, id="compared"),
        pytest.param(releasing_weights, {"tags": None}, True, id="all memory released"),
        pytest.param(releasing_weights, {"tags": ["kv_cache", "weights"]}, True, id="released"),
        pytest.param(releasing_weights, {"tags": ["kv_cache"]}, False, id="other memory released"),
    ],
)
def test_engine_shares_no_pages_after_its_weights_are_reset_or_released(
    shares: Sharing, hook: Callable[..., Any], fields: dict[str, Any], ends: bool
) -> None:
    """The endpoint `weights_checker` can replace them by random numbers. Those in released memory are undefined."""
    shares.begin("pages")

    request = SimpleNamespace(**fields)
    assert hook(lambda _self, given: given, None, request) is request

    assert states() == [("", REPLACED) if ends else ("pages", "")]


def test_weights_are_replaced_as_usual_if_no_pages_are_shared(shares: Sharing) -> None:
    before = states()
    assert replacing_weights(lambda _self, given: given, None, 1) == 1
    assert states() == before


def attached(_engine: object, _request: object) -> SimpleNamespace:
    """SGLang's method that attaches a storage, if it succeeds."""
    return SimpleNamespace(success=True)


@pytest.mark.parametrize("shareable", [True, False], ids=["shares pages", "shares none"])
def test_no_other_storage_is_attached_to_an_engine_with_a_common_prefix_cache(
    shares: Sharing, monkeypatch: pytest.MonkeyPatch, shareable: bool
) -> None:
    io_struct: Any = ModuleType("io_struct")
    io_struct.AttachHiCacheStorageReqOutput = SimpleNamespace
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", io_struct)
    if shareable:
        shares.begin("pages")
    else:
        shares.refuse("the weights cannot be identified")

    answer = refuse_other_storage(attached, None, None)

    assert not answer.success
    assert "restart it" in answer.message


def test_storage_is_attached_as_usual_to_an_engine_with_a_separate_prefix_cache(shares: Sharing) -> None:
    assert refuse_other_storage(attached, None, None).success


@dataclass(frozen=True)
class StorageConfig:
    """SGLang's configuration of a storage backend."""

    extra_config: dict[str, str] | None


@pytest.mark.parametrize(
    "settings", [{TAG: "operator", "protocol": "tcp"}, None], ids=["operator", "by hand"]
)
def test_unsupported_version_reports_that_no_pages_are_shared_and_uses_names_of_its_own(
    shares: Sharing, settings: dict[str, str] | None
) -> None:
    def construct(_self: object, *arguments: Any) -> Any:
        return arguments

    config = StorageConfig(settings)
    wrapped = not_shared("SGLang 0.6.0 is not supported")
    (first, pool), (second, _) = (wrapped(construct, None, config, "pool") for _ in range(2))
    assert states() == [("", "SGLang 0.6.0 is not supported")]
    assert pool == "pool"
    tags = {first.extra_config.pop(TAG), second.extra_config.pop(TAG), "operator"}
    assert len(tags) == 3
    assert first.extra_config == {name: value for name, value in (settings or {}).items() if name != TAG}
