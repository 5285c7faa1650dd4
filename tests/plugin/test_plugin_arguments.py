"""Arguments of an engine with which it shares no pages."""

from types import SimpleNamespace
from typing import Any

import pytest

from dps_sglang.arguments import check_shareable
from dps_sglang.sharing import NotShareable

SHAREABLE: dict[str, Any] = {"enable_lora": False, "speculative_algorithm": None, "tokenizer_worker_num": 1}


def check(*, rust_server: bool = False, **changed: Any) -> None:
    check_shareable(SimpleNamespace(**SHAREABLE | changed), rust_server=rust_server)


@pytest.mark.parametrize("algorithm", [None, "NGRAM", "STANDALONE", "standalone"])
def test_engines_whose_pages_are_those_of_a_greedy_engine_share(algorithm: str | None) -> None:
    check(speculative_algorithm=algorithm)


@pytest.mark.parametrize(
    "algorithm", ["EAGLE", "EAGLE3", "NEXTN", "DFLASH", "an algorithm of another plugin"]
)
def test_engine_whose_draft_kv_cannot_be_refilled_shares_no_pages(algorithm: str) -> None:
    with pytest.raises(NotShareable, match=f"^{algorithm} engines require the KV of their draft models"):
        check(speculative_algorithm=algorithm)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"enable_lora": True}, "LoRA"),
        ({"tokenizer_worker_num": 2}, "remove --tokenizer-worker-num"),
        ({"rust_server": True}, "SGLANG_RUST_SERVER"),
    ],
)
def test_other_arguments_rule_out_sharing(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotShareable, match=reason):
        check(**changed)
