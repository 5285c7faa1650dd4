"""A token counter that the tests share, because loading its tokenizer takes seconds."""

import pytest

from dps_lab.replay.oracle import PromptCounter
from dps_local.assets import bundled_tokenizer


@pytest.fixture(scope="session")
def counter() -> PromptCounter:
    result = PromptCounter(bundled_tokenizer())
    result.text_tokens("loads the tokenizer")
    return result
