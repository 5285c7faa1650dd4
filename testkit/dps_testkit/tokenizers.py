"""Tokenizers that the tests of a process share, because loading one takes seconds."""

from functools import cache

from dps_gateway.prompt.tokenizer import Tokenizer
from dps_local.assets import bundled_tokenizer


@cache
def shared_tokenizer(source: str | None = None) -> Tokenizer:
    """The tokenizer in the folder `source`, or else the bundled one."""
    return Tokenizer.load(source or str(bundled_tokenizer()))
