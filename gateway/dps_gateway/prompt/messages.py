"""Convert a request of Anthropic's Messages API to a chat request, as the engine does. This module performs no I/O.

Follows SGLang 0.5.23 (`entrypoints/anthropic/serving.py`: `_convert_to_chat_completion_request`). Fields that do not
affect the prompt are left out, and so is `cache_control`, which SGLang ignores.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.sandbox

_SERVER_TOOLS: Final = ("web_search_", "computer_", "bash_", "text_editor_")
"""Prefixes of the types of tools that Anthropic executes. SGLang does not pass them to the model."""
_THINKING: Final = ("thinking", "redacted_thinking")
_PROBE: Final = "inline-system-probe"


@lru_cache(maxsize=8)
def renders_inline_system(chat_template: str) -> bool:
    """Whether the template renders a system message that is not the first message.

    For other templates, SGLang appends the text of such messages to the system prompt.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    roles = ("system", "user", "system", "user")
    messages = [{"role": role, "content": "t"} for role in roles]
    messages[2]["content"] = _PROBE
    try:
        text = environment.from_string(chat_template).render(messages=messages, add_generation_prompt=False)
    except Exception:  # a template may raise anything
        return False
    return _PROBE in text


def chat_request(body: dict[str, Any], *, inline_system: bool, reasoning: bool) -> dict[str, Any]:
    """The chat request for a request to /v1/messages, without the fields that do not affect the prompt.

    `reasoning` states whether the engine has a reasoning parser. Raises KeyError, TypeError, AttributeError or
    ValueError if the engine will refuse the request.
    """
    messages: list[dict[str, Any]] = []
    if system := _system_prompt(body, merge_inline=not inline_system):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        role, content = message["role"], message["content"]
        if role == "system" and not inline_system:
            continue
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        else:
            messages.extend(_messages(role, content, reasoning))
    tools = _tools(body.get("tools") or ())
    return {
        "model": body.get("model"),
        "messages": messages,
        "tools": tools or None,
        "tool_choice": _tool_choice(body.get("tool_choice"), tools),
        "chat_template_kwargs": _variables(body, reasoning),
    }


def _system_prompt(body: dict[str, Any], *, merge_inline: bool) -> str:
    system = body.get("system") or ()
    if isinstance(system, str):
        parts = [system] if system.strip() else []
    else:
        parts = [block["text"] for block in system if block["type"] == "text" and block["text"]]
    if merge_inline:
        inline = (_inline_text(m["content"]) for m in body["messages"] if m["role"] == "system")
        parts += [text for text in inline if text]
    return "\n".join(parts)


def _inline_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content.strip()
    texts = (block["text"].strip() for block in content if block["type"] == "text")
    return "\n".join(text for text in texts if text)


def _messages(role: str, blocks: list[dict[str, Any]], reasoning: bool) -> Iterator[dict[str, Any]]:
    """The chat messages for one message of content blocks: each tool result of a user becomes a separate message."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    if role == "assistant" and (thoughts := _thoughts(blocks)) and reasoning:
        parts.append(_text(f"<think>{thoughts}\n</think>"))
    for block in blocks:
        kind = block["type"]
        if kind == "tool_use":
            arguments = block.get("input") or {}
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            if parts:
                yield {"role": role, "content": _content(parts)}
                parts = []
            call_id = block.get("tool_use_id") or block.get("id") or ""
            for content in _tool_contents(block.get("content")):
                yield {"role": "tool", "tool_call_id": call_id, "content": content}
        elif kind == "tool_result":
            parts.append(_text(f"Tool result: {_tool_text(block.get('content'))}"))
        elif kind not in _THINKING:
            parts.extend(_parts(block))
    if parts or calls or role != "user":
        message: dict[str, Any] = {"role": role}
        if calls:
            message["tool_calls"] = calls
        if parts or not calls:
            message["content"] = _content(parts)
        yield message


def _thoughts(blocks: list[dict[str, Any]]) -> str:
    if any(block["type"] == "redacted_thinking" for block in blocks):
        raise ValueError("redacted_thinking is not supported")
    return "\n".join(
        block["thinking"] for block in blocks if block["type"] == "thinking" and block["thinking"]
    )


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content of a message: a string if it is a single text."""
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def _parts(block: dict[str, Any]) -> list[dict[str, Any]]:
    """The content part for a block of a message, if any."""
    kind = block["type"]
    if kind == "text":
        return [_text(block["text"])]
    if kind == "image":
        return _image(block.get("source"))
    if kind == "search_result":
        text = _search_result(block)
        return [_text(text)] if text else []
    if kind == "tool_reference":  # dropped outside of tool results
        return []
    raise ValueError(f"unknown content block {kind!r}")


def _image(source: Any) -> list[dict[str, Any]]:
    if not isinstance(source, dict):
        return []
    if source.get("type") == "base64":
        data = source.get("data", "")
        url = f"data:{source.get('media_type', 'image/png')};base64,{data}" if data else None
    else:
        url = source.get("url")
    return [{"type": "image_url", "image_url": {"url": url}}] if url else []


def _search_result(block: dict[str, Any]) -> str:
    source = block.get("source")
    if isinstance(source, dict):
        source = source.get("url") or source.get("text")
    texts = [
        part["text"] for part in block.get("content") or () if part.get("type") == "text" and part.get("text")
    ]
    labelled = {"Title": block.get("title"), "Source": source, "Content": "\n".join(texts)}
    lines = [f"{label}: {text}" for label, text in labelled.items() if text]
    return "\n".join(lines)


def _tool_parts(blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for block in blocks:
        if block["type"] == "tool_reference":
            if name := block.get("tool_name") or block.get("name"):
                yield {"type": "tool_reference", "name": name}
        elif block["type"] in ("text", "image", "search_result"):
            yield from (part for part in _parts(block) if part.get("text") != "")


def _tool_contents(content: Any) -> list[str | list[dict[str, Any]]]:
    """The contents of the tool messages for a tool result: runs of tool references become separate messages."""
    if not isinstance(content, list):
        return [content or ""]
    runs: list[list[dict[str, Any]]] = []
    for part in _tool_parts(content):
        refers = part["type"] == "tool_reference"
        if not runs or (runs[-1][0]["type"] == "tool_reference") != refers:
            runs.append([])
        runs[-1].append(part)
    return [_content(run) for run in runs] or [""]


def _tool_text(content: Any) -> str:
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part["text"] for part in _tool_parts(content) if part["type"] == "text")


def _tools(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_tool(tool) for tool in tools if not (tool.get("type") or "").startswith(_SERVER_TOOLS)]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise ValueError(f"unknown tool type {tool['type']!r}")
    schema = tool["input_schema"]
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": schema if "type" in schema else schema | {"type": "object"},
        "strict": tool.get("strict", False),
    }
    return {"type": "function", "function": function, "defer_loading": tool.get("defer_loading")}


def _tool_choice(choice: dict[str, Any] | None, tools: list[dict[str, Any]]) -> Any:
    kind = choice["type"] if choice is not None else "auto"
    if kind == "none" or (kind == "auto" and not tools):
        return "none"
    if kind == "auto":
        return "auto"
    if not tools:
        raise ValueError(f"the tool choice {kind!r} requires a tool")
    if kind == "any":
        return "required"
    assert choice is not None
    if all(tool["function"]["name"] != choice.get("name") for tool in tools):
        raise ValueError("the chosen tool is not among the tools")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _variables(body: dict[str, Any], reasoning: bool) -> dict[str, Any]:
    """The chat template's variables for `thinking` and `output_config.effort`.

    SGLang sets the one of the two variables for thinking that the template reads.
    """
    variables: dict[str, Any] = {}
    if (thinking := body.get("thinking")) is not None:
        enabled = thinking["type"] != "disabled"
        if reasoning:
            variables |= {"thinking": enabled, "enable_thinking": enabled}
        elif enabled:
            raise ValueError("thinking requires a reasoning parser")
    effort = (body.get("output_config") or {}).get("effort")
    if effort is not None:
        variables["reasoning_effort"] = "max" if effort == "xhigh" else effort
    return variables
