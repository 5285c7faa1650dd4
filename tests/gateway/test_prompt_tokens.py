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

from dps_gateway.api.endpoints import ROUTES
from dps_gateway.api.errors import BadRequest
from dps_gateway.engine.sglang import SGLang
from dps_gateway.pool import Pool
from dps_gateway.prompt.accounting import Accountant, Prompt, Uncountable
from dps_gateway.prompt.boundaries import MAX_LOOKUPS
from dps_gateway.prompt.description import Description, TokenizerError
from dps_gateway.prompt.template import compiled
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.session.record import Holder, Point
from dps_lab.workload.assets import bfcl
from dps_lab.workload.bfcl import load_bfcl
from dps_lab.workload.sessions import Session, load_sessions
from dps_local.assets import bundled_tokenizer, qwen_tokenizer
from dps_testkit.tokenizers import shared_tokenizer

RECORDED = json.loads((Path(__file__).parent / "fixtures" / "prompt_tokens_sglang_0_5_23.json").read_text())

COUNTED_THOUGH_REJECTED = {
    "chat: role in capitals": 18,
    "chat: tool arguments a list": 79,
    "chat: image part": 29,
    "responses: input: developer image": 25,
    "responses: input: image": 33,
    "responses: input: image object": 29,
    "responses: unknown tool": 38,
    "messages: image": 33,
    "messages: image in a tool result": 87,
    "messages: unknown role": 39,
    "chat: unknown part": 29,
    "chat: unknown role": 24,
    "chat: tool with parameters that are no schema": 147,
    "chat: tool schema that is none": 156,
    **dict.fromkeys(
        (
            "chat: model null",
            "chat: model with adapter syntax",
            "chat: chat_template of the request",
            "chat: tool_choice named, not there",
            "chat: tool_choice required without tools",
        ),
        38,
    ),
}
"""Recorded requests that SGLang rejects for reasons that do not affect rendering.

The gateway cannot count the other rejected requests.
"""

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
def accountant(tokenizer: Tokenizer) -> Accountant:
    return Accountant(tokenizer, SGLang())


@pytest.fixture(scope="module")
def reference() -> Any:
    """The plain Hugging Face tokenizer: whole prompts, as an engine tokenizes them."""
    return AutoTokenizer.from_pretrained(real_tokenizer())


def point_of(prompt: Prompt, length: int, boundary_tokens: int) -> Point:
    """The point that the session's record keeps of a prompt."""
    return Point(1, prompt.digest, prompt.offset, boundary_tokens, length, (Holder(Pool.GREEDY, "aaaa"),))


def length_of(accountant: Accountant, path: str, body: dict[str, Any]) -> int:
    (route,) = (route for route in ROUTES if route.path == path)
    return sum(prompt.count(None)[0] for prompt in route.prompts(accountant, body))


@pytest.mark.parametrize(
    "case", [case for case in RECORDED if case["prompt_tokens"] is not None], ids=lambda case: case["name"]
)
def test_count_equals_the_length_reported_by_sglang(accountant: Accountant, case: dict[str, Any]) -> None:
    """Recorded from SGLang 0.5.23; e2e/real_sglang compares with a running engine."""
    assert length_of(accountant, case["path"], case["body"]) == case["prompt_tokens"]


@pytest.mark.parametrize(
    "case", [case for case in RECORDED if case["prompt_tokens"] is None], ids=lambda case: case["name"]
)
def test_request_that_the_engine_rejects_is_counted_only_if_it_can_be_rendered(
    accountant: Accountant, case: dict[str, Any]
) -> None:
    expected = COUNTED_THOUGH_REJECTED.get(case["name"])
    if expected is None:
        with pytest.raises(BadRequest if case["path"] == "/v1/completions" else Uncountable):
            length_of(accountant, case["path"], case["body"])
    else:
        assert length_of(accountant, case["path"], case["body"]) == expected


def sessions() -> list[Session]:
    asset = bfcl()
    return load_bfcl(asset.path) if asset.source == "registry" else load_sessions(asset.path)


@pytest.mark.timeout(600)  # tokenizing all prompts of BFCL completely takes most of the time
def test_bfcl_turn_by_turn_equals_whole_prompt_tokenization(accountant: Accountant, reference: Any) -> None:
    """Every turn of every session, each counted from the previous turn's point."""
    turns = 0
    for session in sessions():
        base: Point | None = None
        prompts, lengths = [], []
        for messages in session.prompts():
            body = {"messages": messages} | ({"tools": session.tools} if session.tools else {})
            prompt = accountant.chat(body)
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
    accountant = Accountant(tokenizer, SGLang())
    history = [
        {"role": "user", "content": "a long beginning " * 500},
        {"role": "assistant", "content": "yes"},
    ]
    first = accountant.chat({"messages": history[:1]})
    base = point_of(first, *first.count(None))
    counted.clear()
    accountant.chat({"messages": [*history, {"role": "user", "content": "and now?"}]}).count(base)
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
def thinking_accountant() -> Accountant:
    hf = AutoTokenizer.from_pretrained(real_tokenizer())
    hf.chat_template = THINKING_TEMPLATE
    return Accountant(Tokenizer(Description.of(hf)), SGLang())


class TestAdversarialHistories:
    """Counting from a recorded prefix equals counting the whole prompt, for any history."""

    @staticmethod
    def check(accountant: Accountant, reference: Any, first: Any, second: Any, **extra: Any) -> None:
        before = accountant.chat({"messages": first, **extra})
        base = point_of(before, *before.count(None))
        for messages in edits(first, second):
            prompt = accountant.chat({"messages": messages, **extra})
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
        self, accountant: Accountant, reference: Any, first: Any, second: Any
    ) -> None:
        self.check(accountant, reference, first, second)

    @given(first=history, second=history, thinking=st.booleans())
    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_prefix_count_is_exact_with_a_template_that_strips_thinking(
        self, thinking_accountant: Accountant, reference: Any, first: Any, second: Any, thinking: bool
    ) -> None:
        kwargs = {"chat_template_kwargs": {"enable_thinking": thinking}}
        self.check(thinking_accountant, reference, first, second, **kwargs)

    @given(text=st.lists(nasty, max_size=12).map("".join), more=st.lists(nasty, max_size=6).map("".join))
    @settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_plain_text_has_no_boundary(
        self, accountant: Accountant, reference: Any, text: str, more: str
    ) -> None:
        try:
            before, after = accountant.text(text), accountant.text(text + more)
        except Uncountable:
            return
        base = point_of(before, *before.count(None))
        assert after.starts_with(base)
        assert after.count(base)[0] == len(reference.encode(text + more))


def test_stripped_thinking_does_not_change_the_history() -> None:
    """The next prompt lacks the generation prompt's `<think>`, but contains all text before it."""
    hf = AutoTokenizer.from_pretrained(str(bundled_tokenizer()))
    hf.chat_template = THINKING_TEMPLATE
    accountant = Accountant(Tokenizer(Description.of(hf)), SGLang())
    first = [{"role": "user", "content": "why?"}]
    answered = [
        *first,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"},
        {"role": "user", "content": "?"},
    ]
    before = accountant.chat({"messages": first})
    assert accountant.chat({"messages": answered}).starts_with(point_of(before, *before.count(None)))


def test_bundled_tokenizer_is_counted_incrementally() -> None:
    tokenizer = shared_tokenizer()
    assert tokenizer.split_token is not None


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
    load = f"from dps_gateway.prompt.description import describe; describe({str(folder)!r})"
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


def test_loading_a_tokenizer_does_not_import_transformers() -> None:
    """Its memory is that of the child process only."""
    program = (
        "import sys; from dps_gateway.prompt.tokenizer import Tokenizer; Tokenizer.load(sys.argv[1]);"
        "print({'transformers', 'tokenizers', 'numpy'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", program, str(bundled_tokenizer())]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"
