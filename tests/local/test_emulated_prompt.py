"""Prompts have the lengths that SGLang reported, and follow its rules."""

import json
from pathlib import Path
from typing import Any

import pytest

from dps_gateway.prompt import messages, responses
from dps_gateway.prompt.tool_schema import normalized_schema
from dps_local.assets import qwen_tokenizer
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.protocol import ChatRequest, CompletionRequest, GenerateRequest, Tool

TRUTH = Path(__file__).parents[1] / "gateway/fixtures/prompt_tokens_sglang_0_5_23.json"
ACCEPTED = [case for case in json.loads(TRUTH.read_text()) if case["status"] == 200]


@pytest.fixture(scope="module")
def qwen() -> Prompts:
    tokenizer = qwen_tokenizer()
    if tokenizer.source != "registry":
        pytest.skip(f"needs Qwen2.5's tokenizer; only {tokenizer.description} is available")
    return Prompts.load(str(tokenizer.path))


def counted(prompts: Prompts, path: str, body: dict[str, Any]) -> int:
    """The prompt tokens of a request of any kind."""
    if path == "/v1/chat/completions":
        return len(prompts.encode_chat(ChatRequest.model_validate(body)))
    if path == "/v1/messages":
        chat = messages.chat_request(body, inline_system=prompts.renders_inline_system, reasoning=False)
        return len(prompts.encode_chat(ChatRequest.model_validate(chat)))
    if path == "/v1/responses":
        chat = responses.chat_request(body, inline_system=prompts.renders_inline_system)
        return len(prompts.encode_chat(ChatRequest.model_validate(chat)))
    if path == "/v1/completions":
        inputs = CompletionRequest.model_validate(body).prompt
    else:
        native = GenerateRequest.model_validate(body)
        inputs = native.text if native.text is not None else native.input_ids or ""
    batch, _ = prompts.encode_inputs(inputs)
    return sum(map(len, batch))


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case["name"])
def test_prompt_length_equals_sglangs(case: dict[str, Any], qwen: Prompts) -> None:
    assert counted(qwen, case["path"], case["body"]) == case["prompt_tokens"]


@pytest.mark.parametrize(
    ("given", "normalized"),
    [
        ({"type": "dict"}, {"type": "object"}),
        ({"type": "float"}, {"type": "number"}),
        ({"type": "varchar(255)"}, {"type": "string"}),
        ({"type": "list[str]"}, {"type": "array"}),
        ({"type": "internal"}, {"type": "internal"}),
        ({"type": ["int", "integer", "null"]}, {"type": ["integer", "null"]}),
        ({"properties": {"type": {"type": "tuple"}}}, {"properties": {"type": {"type": "array"}}}),
        ({"items": {"type": "bool"}, "enum": ["int"]}, {"items": {"type": "boolean"}, "enum": ["int"]}),
        (
            {"anyOf": [{"type": "long"}, {"type": "map"}]},
            {"anyOf": [{"type": "integer"}, {"type": "object"}]},
        ),
        ({"description": {"type": "int"}}, {"description": {"type": "int"}}),
    ],
)
def test_type_names_in_tool_schemas_are_normalized_to_json_schema(given: Any, normalized: Any) -> None:
    assert normalized_schema(given) == normalized


def test_tool_keeps_the_clients_key_order_and_gains_sglangs_defaults() -> None:
    tool = Tool.model_validate({"type": "function", "function": {"parameters": {}, "name": "f"}})
    assert json.dumps(tool.model_dump()) == json.dumps(
        {
            "type": "function",
            "function": {"parameters": {}, "name": "f", "description": None},
            "defer_loading": None,
        }
    )


def test_directory_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--tokenizer-path takes a directory"):
        Prompts.load(str(tmp_path))
