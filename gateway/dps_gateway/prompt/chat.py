"""Convert a chat request to the chat template's input, as the engine does. This module performs no I/O.

Follows SGLang 0.5.23 (`serving_chat.py`: `_process_messages`, `_apply_jinja_template`; `jinja_template_utils.py`;
`protocol.py`), because every additional or missing field of a tool schema changes L_t.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

import jinja2
import orjson
from jinja2 import nodes

from dps_gateway.prompt.prefixes import content_digest

ContentFormat = Literal["string", "openai"]

_MESSAGE_FIELDS: Final = (
    "role", "content", "tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix",
)  # fmt: skip
_PLAIN_FIELDS: Final = frozenset(("role", "content"))
_FUNCTION_FIELDS: Final = ("description", "name", "parameters", "strict", "defer_loading")
_OMITTED_WHEN_NULL: Final = ("strict", "defer_loading")
_MULTIMODAL_WORDS: Final = ("image", "audio", "video", "vision")
_MEDIA_PARTS: Final = {
    "image_url": "image", "input_image": "image", "video_url": "video",
    "audio_url": "audio", "input_audio": "audio",
}  # fmt: skip
MAX_CACHED_LISTS: Final = 64
"""The number of converted tool lists that are cached, those that were used last."""

MAX_CACHED_LIST_BYTES: Final = 512 * 1024
"""Tool lists that need more memory are converted on every request instead of being cached."""

_VALUE_BYTES: Final = 100
"""Approximate memory of a parsed JSON value, in addition to its text. Short values need much more memory than text."""

MAX_MIXED_TYPES: Final = 64
"""Limit of the length of a `type` list that does not contain only strings, because its values are compared in pairs."""

_STANDARD_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_ALIASES: Final = {
    alias: standard
    for standard, aliases in {
        "string": "str text varchar char enum uuid date datetime time timestamp binary blob bytea bytes varbinary",
        "boolean": "bool",
        "integer": "bigint smallint tinyint",
        "number": "double decimal real numeric",
        "array": "arr tuple set",
        "object": "map",
    }.items()
    for alias in aliases.split()
}
_PREFIXES: Final = {
    "int": "integer", "uint": "integer", "long": "integer", "short": "integer", "unsigned": "integer",
    "num": "number", "float": "number", "list": "array", "dict": "object",
}  # fmt: skip
_AFTER_PREFIX: Final = frozenset("0123456789[<( \t")

_SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMA_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMAS: Final = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatInput:
    """The chat template's input."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    continuation: str = ""
    """Text that the engine appends after the generation prompt."""
    media: tuple[tuple[int, bytes], ...] = ()
    """The index of every message with media, and a digest of the media."""


def content_format(chat_template: str) -> ContentFormat:
    """Whether the template iterates over content parts ('openai') or expects a single string."""
    if any(word in chat_template for word in _MULTIMODAL_WORDS):
        return "openai"
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(chat_template)
    except jinja2.TemplateError:
        return "string"
    loops = (loop.iter for loop in tree.find_all(nodes.For))
    return "openai" if any(_is_content(node) for node in loops) else "string"


def chat_input(body: dict[str, Any], expects: ContentFormat) -> ChatInput:
    """The template's input for a request; `expects` is the template's content format.

    Raises KeyError, TypeError or ValueError if the engine will refuse the request.
    """
    messages = [_message(message, expects) for message in body["messages"]]
    continuation = ""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and isinstance(last["content"], str):
        if body.get("continue_final_message"):
            continuation = last["content"]
            del messages[-1]
        else:
            messages[-1] = {"role": "user", "content": last["content"]}
    return ChatInput(
        messages, _tools(body), _variables(body), continuation, _media(body["messages"][: len(messages)])
    )


def _message(message: dict[str, Any], expects: ContentFormat) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if role == "user":
        result = {"role": role, "content": content}
    elif message.keys() == _PLAIN_FIELDS:  # the usual case, without further fields to check
        role = role.lower()
        result = {"role": role, "content": "" if content is None else content}
    else:
        role = role.lower()
        result = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
        result |= {"role": role, "content": "" if content is None else content}
        if "tool_calls" in result:
            result["tool_calls"] = [_tool_call(call, role) for call in result["tool_calls"]]
        if "tools" in result:
            result["tools"] = [_tool(tool) for tool in result["tools"]]
    if isinstance(content, list):
        result["content"] = _parts(content, expects)
    if role == "tool":
        result["content"] = _tool_result(result["content"])
    return result


def _media(messages: list[dict[str, Any]]) -> tuple[tuple[int, bytes], ...]:
    """The indices of messages with media parts, and digests of these parts."""
    found = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and (
            parts := [part for part in content if part.get("type") in _MEDIA_PARTS]
        ):
            found.append((index, content_digest(parts)))
    return tuple(found)


def _parts(parts: list[dict[str, Any]], expects: ContentFormat) -> str | list[dict[str, Any]]:
    if expects == "string":
        return " ".join(part["text"] for part in parts if part.get("type") in ("text", "input_text"))
    result: list[dict[str, Any]] = []
    for part in parts:
        kind = part.get("type")
        if kind in ("text", "input_text"):
            result.append({"type": "text", "text": part["text"]})
        elif kind in _MEDIA_PARTS:
            result.append({"type": _MEDIA_PARTS[kind]})
        elif kind == "tool_reference":
            result.append(part)
    return result


def _tool_result(content: Any) -> Any:
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        return " ".join(part.get("text", "") for part in content)
    return content


def _tool_call(call: dict[str, Any], role: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if role == "assistant" and isinstance(arguments, str):
        arguments = orjson.loads(arguments)
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": call.get("type", "function"),
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _tools(body: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools or choice == "none":
        return None
    if isinstance(choice, dict):
        named = choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == named]
    encoded = orjson.dumps(tools)
    if _memory(encoded) > MAX_CACHED_LIST_BYTES:
        return [_tool(tool) for tool in tools] or None
    # A session sends the same tools with every turn, and so do all sessions of an agent. The key is a copy, because
    # orjson's result keeps its larger buffer.
    return _cached_conversion(bytes(memoryview(encoded))) or None


@lru_cache(maxsize=MAX_CACHED_LISTS)
def _cached_conversion(encoded: bytes) -> list[dict[str, Any]]:
    return [_tool(tool) for tool in orjson.loads(encoded)]


def _memory(encoded: bytes) -> int:
    """The approximate memory (bytes) of a JSON text and of the values that are parsed from it."""
    return len(encoded) + _VALUE_BYTES * sum(encoded.count(mark) for mark in (b",", b"{", b"["))


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema in the client's order, with the fields that the engine's Pydantic model adds."""
    definition, deferred = tool["function"], tool.get("defer_loading")
    function = {name: value for name, value in definition.items() if name in _FUNCTION_FIELDS}
    for name in _FUNCTION_FIELDS:
        function.setdefault(name, None)
    function["parameters"] = normalized_schema(function["parameters"])
    if deferred is not None and function["defer_loading"] is None:
        function["defer_loading"] = deferred
    for name in _OMITTED_WHEN_NULL:
        if function[name] is None:
            del function[name]
    return {"type": tool.get("type", "function"), "function": function, "defer_loading": deferred}


def normalized_schema(schema: Any) -> Any:
    """`schema` with every known alias of a JSON Schema type (`dict`, `float`, `varchar(255)`) replaced by that type.

    Equivalent to `normalize_json_schema_types` in SGLang's function_call/utils.py. Key order is preserved.

    Raises ValueError for an invalid `type` list with more than MAX_MIXED_TYPES values.
    """
    if isinstance(schema, list):
        return [normalized_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _normalized_entry(key, value) for key, value in schema.items()}


def _normalized_entry(key: str, value: Any) -> Any:
    if key == "type" and isinstance(value, str):
        return _normalized_type(value)
    if key == "type" and isinstance(value, list):
        types = [_normalized_type(item) for item in value]
        if all(isinstance(item, str) for item in types):
            return list(dict.fromkeys(types))
        if len(types) > MAX_MIXED_TYPES:
            raise ValueError("a type list is too long")
        return [item for index, item in enumerate(types) if item not in types[:index]]
    if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: normalized_schema(item) for name, item in value.items()}
    if key in _SCHEMAS or (key in _SCHEMA_LISTS and isinstance(value, list)):
        return normalized_schema(value)
    return value


def _normalized_type(name: Any) -> Any:
    if not isinstance(name, str) or name in _STANDARD_TYPES:
        return name
    base = name.split("(", 1)[0].strip().lower()
    if base in _STANDARD_TYPES:
        return base
    if base in _ALIASES:
        return _ALIASES[base]
    for prefix, standard in _PREFIXES.items():
        if base == prefix or (base.startswith(prefix) and base[len(prefix)] in _AFTER_PREFIX):
            return standard
    return name


def _variables(body: dict[str, Any]) -> dict[str, Any]:
    """The template's extra variables: chat_template_kwargs, and variables derived from reasoning settings."""
    reasoning = body.get("reasoning")
    effort = body.get("reasoning_effort")
    thinking: bool | None = None
    if isinstance(reasoning, dict):
        nested = reasoning.get("effort", reasoning.get("reasoning_effort"))
        effort = nested if nested is not None else effort
        enabled = reasoning.get("enabled", reasoning.get("enable"))
        if isinstance(enabled, str):
            enabled = enabled.strip().lower() in {"1", "true", "yes", "y", "on"}
        thinking = True if enabled else None
    if effort is not None:
        thinking = effort != "none"
    variables = {} if effort is None else {"reasoning_effort": effort}
    variables |= body.get("chat_template_kwargs") or {}
    if thinking is not None:
        variables.setdefault("thinking", thinking)
        variables.setdefault("enable_thinking", thinking)
    return variables


def _is_content(node: nodes.Node, names: tuple[str, ...] = ("message", "msg", "m")) -> bool:
    """Whether a loop iterates over `message.content` or `message['content']`, possibly filtered or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and isinstance(node.node, nodes.Name) and node.node.name in names
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node)
        is_key = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        return is_key and isinstance(node.node, nodes.Name) and node.node.name in names
    return False
