"""A tokenizer that the tests share, because loading it takes seconds, and a trace."""

import json
from pathlib import Path

import pytest

from dps_local.assets import bundled_tokenizer
from dps_local.emulated_sglang.prompt import Prompts


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return Prompts.load(str(bundled_tokenizer()))


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    turns = [{"prompt_tokens": 500 + 90 * n, "output_tokens": 20, "think_seconds": 0} for n in range(3)]
    lines = [
        {"id": f"s{n}", "prefix": "p", "prefix_tokens": 400, "arrival_seconds": n / 2, "turns": turns}
        for n in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
