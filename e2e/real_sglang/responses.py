"""Named requests of OpenAI's Responses API that cover SGLang's conversion to chat requests. Data only, no I/O."""

from collections.abc import Iterator
from typing import Any

RESPONSES = "/v1/responses"

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Today's weather",
    "parameters": SCHEMA,
}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "strict": True}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edit files"}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
SEARCH = {"type": "web_search"}
QUESTION = {"role": "user", "content": "What is the weather in Zürich?"}
CALL: dict[str, Any] = {
    "type": "function_call",
    "id": "fc_1",
    "call_id": "call_1",
    "name": "weather",
    "arguments": '{"city": "Zürich", "days": 2.0}',
}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
EDIT = {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": 'say "hi"\n'}
EDITED = {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "It is a city."}]}
STATE = "sglang-reasoning-v1.eJzzVMgsVkhUSM4sqdQDABmABCc="
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}


def said(role: str, *parts: Any, **fields: Any) -> dict[str, Any]:
    """A message of content parts."""
    return {"type": "message", "role": role, "content": list(parts)} | fields


def asked(text: str) -> dict[str, Any]:
    """A text part of the input."""
    return {"type": "input_text", "text": text}


def answered(text: str, **fields: Any) -> dict[str, Any]:
    """A message of an earlier response."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return said("assistant", part, id="msg_1", status="completed", **fields)


INPUTS: dict[str, Any] = {
    "text": "What is the weather in Zürich?",
    "empty text": "",
    "no items": [],
    "one message": [QUESTION],
    "grown conversation": [QUESTION, answered("Sunny."), {"role": "user", "content": "And in Bern?"}],
    "parts": [said("user", asked("Hello"), asked("again")), said("user", {"type": "text", "text": "!"})],
    "developer text": [{"role": "developer", "content": "Be terse."}, QUESTION],
    "developer parts": [said("developer", asked("Be"), asked("terse.")), QUESTION],
    "developer image": [said("developer", IMAGE), QUESTION],
    "developer without content": [{"role": "developer", "content": []}, QUESTION],
    "system later": [QUESTION, answered("Sunny."), {"role": "system", "content": "Be kind."}, QUESTION],
    "developer later": [QUESTION, answered("Sunny."), {"role": "developer", "content": "Be kind."}, QUESTION],
    "assistant last": [QUESTION, {"role": "assistant", "content": "It is "}],
    "function call": [QUESTION, CALL, OUTPUT],
    "function call last": [QUESTION, CALL],
    "function call with text": [QUESTION, answered("Looking."), CALL, OUTPUT],
    "function call, arguments invalid": [QUESTION, CALL | {"arguments": '{"city"'}, OUTPUT],
    "function call, arguments a list": [QUESTION, CALL | {"arguments": "[1]"}, OUTPUT],
    "function call, arguments an object": [QUESTION, CALL | {"arguments": {"city": "Bern"}}, OUTPUT],
    "function call, arguments empty": [QUESTION, CALL | {"arguments": ""}, OUTPUT],
    "two function calls": [
        QUESTION,
        CALL,
        CALL | {"call_id": "call_2"},
        OUTPUT,
        OUTPUT | {"call_id": "call_2"},
    ],
    "function output of parts": [
        QUESTION,
        CALL,
        OUTPUT | {"output": [asked("rain"), asked(" and sun"), IMAGE]},
    ],
    "function output without output": [QUESTION, CALL, {"type": "function_call_output", "call_id": "call_1"}],
    "custom tool call": [QUESTION, EDIT, EDITED],
    "custom tool call without input": [QUESTION, EDIT | {"input": ""}, EDITED],
    "reasoning": [QUESTION, THOUGHT, answered("Sunny."), QUESTION],
    "reasoning content": [
        QUESTION,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        CALL,
        OUTPUT,
    ],
    "reasoning state": [
        QUESTION,
        {"type": "reasoning", "summary": [], "encrypted_content": STATE},
        CALL,
        OUTPUT,
    ],
    "reasoning state invalid": [
        QUESTION,
        {"type": "reasoning", "encrypted_content": "sglang-reasoning-v1.x"},
    ],
    "reasoning empty": [QUESTION, {"type": "reasoning", "summary": []}, answered("Sunny."), QUESTION],
    "reasoning twice": [QUESTION, THOUGHT, THOUGHT, answered("Sunny."), QUESTION],
    "phases": [
        QUESTION,
        answered("First", phase="commentary"),
        answered("Then", phase="final_answer"),
        QUESTION,
    ],
    "phases with reasoning": [QUESTION, THOUGHT, answered("Then", phase="final_answer"), QUESTION],
    "two answers": [QUESTION, answered("One."), {"role": "assistant", "content": "Two."}, QUESTION],
    "two texts": [
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
        QUESTION,
    ],
    "answer with empty text": [QUESTION, {"role": "assistant", "content": ""}, answered("One."), QUESTION],
    "image": [said("user", IMAGE, asked("What is this?"))],
    "image object": [said("user", {"type": "input_image", "image_url": {"url": "data:,x"}})],
    "item reference": [QUESTION, {"type": "item_reference", "id": "msg_1"}],
    "unknown item": [QUESTION, {"type": "web_search_call", "id": "ws_1"}],
    "without role": [{"content": "x"}],
}

FIELDS: dict[str, dict[str, Any]] = {
    "input missing": {"input": None},
    "instructions": {"instructions": "You are terse."},
    "instructions and developer": {
        "instructions": "You are terse.",
        "input": [{"role": "developer", "content": "Be kind."}, QUESTION],
    },
    "instructions and system parts": {
        "instructions": "You are terse.",
        "input": [said("system", asked("Be"), asked("kind.")), QUESTION],
    },
    "instructions empty": {"instructions": ""},
    "tools": {"tools": [WEATHER, CLOCK]},
    "tool without name": {"tools": [{"type": "function"}]},
    "custom tool": {"tools": [PATCH, WEATHER]},
    "custom tool with grammar": {"tools": [PATCH | {"format": GRAMMAR}]},
    "custom tool without description": {
        "tools": [{"type": "custom", "name": "run", "format": {"type": "text"}}]
    },
    "custom tool without name": {"tools": [{"type": "custom"}]},
    "built-in tool": {"tools": [SEARCH]},
    "built-in tool and function": {"tools": [SEARCH, WEATHER]},
    "namespace": {"tools": [{"type": "namespace", "name": "maps", "tools": [WEATHER]}]},
    "shell": {"tools": [{"type": "shell"}]},
    "unknown tool": {"tools": [{"type": "teleport"}]},
    "deferred tool": {"tools": [WEATHER | {"defer_loading": True}]},
    "tool choice none": {"tools": [WEATHER], "tool_choice": "none"},
    "tool choice required": {"tools": [WEATHER], "tool_choice": "required"},
    "tool choice required without tools": {"tool_choice": "required"},
    "tool choice named": {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "name": "clock"}},
    "tool choice named as in chat": {
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "function", "function": {"name": "clock"}},
    },
    "tool choice named, unknown": {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}},
    "tool choice built-in": {"tools": [WEATHER], "tool_choice": {"type": "web_search"}},
    "tool choice unknown": {"tools": [WEATHER], "tool_choice": "sometimes"},
    "reasoning effort": {"reasoning": {"effort": "high"}},
    "reasoning without effort": {"reasoning": {"summary": "auto"}},
    "reasoning effort null": {"reasoning": {"effort": None}},
    "reasoning none": {"reasoning": {"effort": "none"}},
    "reasoning none, but thinking": {
        "reasoning": {"effort": "none"},
        "chat_template_kwargs": {"enable_thinking": True},
    },
    "template variables": {"chat_template_kwargs": {"enable_thinking": False}},
}


def response_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the fields of each request that are not the model's name."""
    for name, value in INPUTS.items():
        yield f"input: {name}", {"input": value}
    for name, fields in FIELDS.items():
        yield name, {"input": [QUESTION]} | fields
