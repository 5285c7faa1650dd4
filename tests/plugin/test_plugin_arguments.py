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


DRAFTS = "engines require the KV of their draft models"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"speculative_algorithm": "EAGLE"}, f"^EAGLE {DRAFTS}"),
        ({"speculative_algorithm": "NEXTN"}, f"^NEXTN {DRAFTS}"),
        ({"speculative_algorithm": "of another plugin"}, f"^of another plugin {DRAFTS}"),
        ({"enable_lora": True}, "LoRA"),
        ({"tokenizer_worker_num": 2}, "remove --tokenizer-worker-num"),
        ({"rust_server": True}, "SGLANG_RUST_SERVER"),
    ],
)
def test_other_algorithms_and_arguments_rule_out_sharing(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotShareable, match=reason):
        check(**changed)
