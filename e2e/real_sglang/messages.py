"""Named requests of Anthropic's Messages API that cover SGLang's conversion to chat requests. Data only, no I/O."""

from collections.abc import Iterator
from typing import Any

MESSAGES = "/v1/messages"

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Today's weather", "input_schema": SCHEMA}
CLOCK: dict[str, Any] = {"name": "clock", "input_schema": {}}
BASH: dict[str, Any] = {"type": "bash_20250124", "name": "bash"}
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
USER = {"role": "user", "content": "What is the weather in Zürich?"}
CALL: dict[str, Any] = {
    "type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich", "days": 2.0}
}  # fmt: skip
CALLED = {"role": "assistant", "content": [CALL]}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
FOUND = {
    "type": "search_result",
    "title": "Zürich",
    "source": "https://example.org/zurich",
    "content": [{"type": "text", "text": "A city."}, {"type": "text", "text": "On a lake."}],
}
LINKED = {"type": "search_result", "source": {"url": "https://example.org"}, "content": []}
THOUGHT = {"type": "thinking", "thinking": "The user asks about Zürich.", "signature": "s"}


def text(value: str, **fields: Any) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": value} | fields


def said(role: str, *blocks: Any) -> dict[str, Any]:
    """A message of content blocks."""
    return {"role": role, "content": list(blocks)}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    """The result of `CALL`; it has no content if `content` is None."""
    block = {"type": "tool_result", "tool_use_id": "toolu_1"} | fields
    return block if content is None else block | {"content": content}


def after_call(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """The question and the tool call, followed by `messages`."""
    return [USER, CALLED, *messages]


GROWN = [
    {"role": "user", "content": "Name a river."},
    {"role": "assistant", "content": "The Aare."},
    {"role": "user", "content": "And a lake?"},
]
NESTED = [text("21 degrees"), text(""), FOUND, text("and rain")]
REFERENCE = {"type": "tool_reference", "tool_name": "weather"}
NAMED_REFERENCE = {"type": "tool_reference", "name": "clock"}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one user message": [USER],
    "grown conversation": GROWN,
    "no messages": [],
    "one text block": [said("user", text("Hello"))],
    "several text blocks": [said("user", text("Hello"), text("again", **EPHEMERAL))],
    "user without blocks": [USER, said("user"), USER],
    "assistant without blocks": [USER, said("assistant"), USER],
    "empty texts": [said("user", text("")), said("assistant", text("")), {"role": "user", "content": ""}],
    "assistant last": [USER, {"role": "assistant", "content": "It is "}],
    "assistant blocks last": [USER, said("assistant", text("It"), text("is"))],
    "tool call last": after_call(),
    "tool result": after_call(said("user", result("rain"))),
    "tool result, missing content": after_call(said("user", result(None))),
    "tool result, empty content": after_call(said("user", result(""))),
    "tool result, empty list": after_call(said("user", result([]))),
    "tool result, one block": after_call(said("user", result([text("rain")]))),
    "tool result, several blocks": after_call(said("user", result(NESTED))),
    "tool result, error": after_call(said("user", result("no network", is_error=True))),
    "tool result, id": after_call(said("user", {"type": "tool_result", "id": "toolu_1", "content": "rain"})),
    "tool result, tool references": after_call(
        said("user", result([text("found"), REFERENCE, NAMED_REFERENCE, text("both")]))
    ),
    "tool result between texts": after_call(
        said("user", text("before"), result("rain"), text("after"), text("and more"))
    ),
    "two tool results": [
        USER,
        said("assistant", text("Looking."), CALL, CALL | {"id": "toolu_2", "input": {}}),
        said("user", result("rain"), result([text("sun")], tool_use_id="toolu_2")),
    ],
    "tool result of the assistant": after_call(said("assistant", result(NESTED)), USER),
    "tool result of the assistant, string": after_call(said("assistant", result("rain"), text("So.")), USER),
    "text after a tool call": [USER, said("assistant", CALL, text("Looking.")), said("user", result("rain"))],
    "tool call without input": [USER, said("assistant", CALL | {"input": {}}), said("user", result("noon"))],
    "search results": [said("user", FOUND, LINKED, text("Summarize."))],
    "tool reference of a user": [said("user", REFERENCE, text("Hello"))],
    "image": [said("user", IMAGE, text("What is this?"))],
    "image without data": [said("user", {"type": "image", "source": {"type": "base64"}}, text("Hello"))],
    "image in a tool result": after_call(said("user", result([text("a map"), IMAGE]))),
    "thinking": [USER, said("assistant", THOUGHT, text("Rain.")), USER],
    "thinking only": [USER, said("assistant", THOUGHT), USER],
    "redacted thinking": [USER, said("assistant", {"type": "redacted_thinking", "data": "x"}), USER],
    "system message first": [{"role": "system", "content": "Be terse."}, USER],
    "system message in the middle": [*GROWN[:2], {"role": "system", "content": " Be terse. "}, GROWN[2]],
    "system blocks in the middle": [*GROWN[:2], said("system", text("Be"), text(" terse. ")), GROWN[2]],
    "unknown block": [said("user", {"type": "document"}, text("Hello"))],
    "unknown role": [{"role": "tool", "content": "x"}],
    "content null": [{"role": "user", "content": None}],
    "number as text": [said("user", {"type": "text", "text": 1})],
}

FIELDS: dict[str, dict[str, Any]] = {
    "system": {"system": "You are terse."},
    "system with spaces": {"system": " You are terse.\n"},
    "system of spaces": {"system": "  "},
    "system blocks": {"system": [text("You are Claude Code.", **EPHEMERAL), text(""), text(" Be terse. ")]},
    "system and system message": {
        "system": "You are terse.",
        "messages": [USER, {"role": "system", "content": "Now be verbose."}, USER],
    },
    "tools": {"tools": [WEATHER, CLOCK]},
    "tools with cache_control": {"tools": [WEATHER | EPHEMERAL | {"type": "custom"}]},
    "tools, strict and deferred": {"tools": [WEATHER | {"strict": True}, CLOCK | {"defer_loading": True}]},
    "tools, schema types": {"tools": [WEATHER | {"input_schema": {"properties": {"n": {"type": "varchar(9)"}}}}]},
    "server tools": {"tools": [BASH, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]},
    "server tool and tool": {"tools": [BASH, WEATHER]},
    "unknown server tool": {"tools": [{"type": "code_execution_20250522", "name": "code_execution"}]},
    "tool without schema": {"tools": [{"name": "weather"}]},
    "no tools": {"tools": []},
    "tools and tool result": {"tools": [WEATHER], "messages": after_call(said("user", result("rain")))},
    "tool_choice auto": {"tools": [WEATHER], "tool_choice": {"type": "auto"}},
    "tool_choice any": {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "tool_choice none": {"tools": [WEATHER], "tool_choice": {"type": "none"}},
    "tool_choice of a tool": {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "tool", "name": "clock"}},
    "tool_choice of another tool": {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "clock"}},
    "tool_choice any without tools": {"tool_choice": {"type": "any"}},
    "tool_choice auto without tools": {"tool_choice": {"type": "auto"}},
    "thinking disabled": {"thinking": {"type": "disabled"}},
    "thinking enabled": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "thinking adaptive": {"thinking": {"type": "adaptive"}},
    "effort": {"output_config": {"effort": "xhigh"}},
    "output format": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "metadata and stop sequences": {"metadata": {"user_id": "u"}, "stop_sequences": ["x"], "top_k": 5, "top_p": 0.9},
    "betas": {"betas": ["context-1m"], "context_management": {"edits": []}},
    "stream": {"stream": True},
}  # fmt: skip


def message_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """The names and bodies of all requests, without the model and sampling parameters."""
    for name, messages in CONVERSATIONS.items():
        yield name, {"messages": messages}
    for name, fields in FIELDS.items():
        yield name, {"messages": [USER]} | fields
