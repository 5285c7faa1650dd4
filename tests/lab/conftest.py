"""A tokenizer that the tests share, because loading it takes seconds."""

import pytest

from dps_local.assets import bundled_tokenizer
from dps_local.emulated_sglang.prompt import Prompts


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return Prompts.load(str(bundled_tokenizer()))
