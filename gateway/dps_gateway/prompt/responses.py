"""Convert a request of OpenAI's Responses API to a chat request, as the engine does. This module performs no I/O.

Follows SGLang 0.5.23 (`entrypoints/openai/serving_responses.py`: `_make_request`). Fields that do not affect the
prompt are left out. SGLang converts requests to models with the harmony format (gpt-oss) in another way.
"""

import base64
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import orjson

_DEVELOPER_LABEL: Final = "Developer instructions:"
_REASONING_STATE: Final = "sglang-reasoning-v1."
_OMITTED_FIELDS: Final = ("id", "status", "type")
_DEFAULT_EFFORT: Final = "medium"

MAX_REASONING_BYTES: Final = 4 * 1024 * 1024
"""Limit of the decompressed size of all reasoning states of a request, because a state may be a thousand times as long
as its compressed form."""


def chat_request(body: dict[str, Any], *, inline_system: bool) -> dict[str, Any]:
    """The chat request for a request to /v1/responses, without the fields that do not affect the prompt.

    `inline_system` states whether the chat template renders a system message that is not the first message. Raises
    KeyError, TypeError, AttributeError or ValueError if the engine will refuse the request, and ValueError if its
    reasoning states are longer than MAX_REASONING_BYTES.
    """
    messages = _merged(_messages(body))
    if not inline_system:
        messages = _with_one_system_message(messages)
    tools = [converted for tool in body.get("tools") or () if (converted := _tool(tool)) is not None]
    reasoning = body.get("reasoning")
    return {
        "model": body.get("model"),
        "messages": messages,
        "tools": tools or None,
        "tool_choice": _tool_choice(body.get("tool_choice", "auto"), tools),
        "reasoning_effort": reasoning.get("effort", _DEFAULT_EFFORT) if reasoning is not None else None,
        "chat_template_kwargs": _variables(body),
    }


def _messages(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if instructions := body.get("instructions"):
        yield {"role": "system", "content": instructions}
    items = body["input"]
    if isinstance(items, str):
        yield {"role": "user", "content": items}
        return
    states = _ReasoningStates()
    for item in items:
        message = _message(item, states)
        if message is not None:
            yield message


def _message(item: dict[str, Any], states: "_ReasoningStates") -> dict[str, Any] | None:
    """The chat message for an input item, or None for reasoning without text."""
    kind = item.get("type")
    if kind == "function_call":
        return _call(item, _arguments(item.get("arguments")))
    if kind == "custom_tool_call":
        return _call(item, orjson.dumps({"input": item.get("input") or ""}).decode())
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = item.get("output", "")
        if isinstance(output, list):
            output = "".join(part.get("text", "") for part in output)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "reasoning":
        text = _reasoning(item, states)
        return {"role": "assistant", "reasoning_content": text} if text else None
    if kind not in (None, "message"):
        raise ValueError(f"unsupported input item {kind!r}")
    if item.get("role") == "developer":
        item = item | {"role": "system", "content": _labelled(item.get("content"))}
    message = {
        name: value for name, value in item.items() if value is not None and name not in _OMITTED_FIELDS
    }
    if isinstance(message.get("content"), list):
        message["content"] = [_part(part) for part in message["content"]]
    return message


def _call(item: dict[str, Any], arguments: str) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": arguments}
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _arguments(arguments: Any) -> str:
    """The arguments of a call as a JSON object; invalid ones are replaced by an empty object."""
    if isinstance(arguments, dict):
        return orjson.dumps(arguments).decode()
    try:
        valid = isinstance(arguments, str) and isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        valid = False
    return arguments if valid else "{}"


def _reasoning(item: dict[str, Any], states: "_ReasoningStates") -> str:
    """The text of a reasoning item: its summary, or else its content, or else the encoded state."""
    for parts in (item.get("summary"), item.get("content")):
        texts = [text for part in parts or () if (text := part.get("text"))]
        if texts:
            return "\n".join(texts)
    state = item.get("encrypted_content")
    if not isinstance(state, str) or not state.startswith(_REASONING_STATE):
        return ""
    return states.text(state.removeprefix(_REASONING_STATE))


class _ReasoningStates:
    """Decodes the reasoning states of one request, up to MAX_REASONING_BYTES in total."""

    def __init__(self) -> None:
        self._left = MAX_REASONING_BYTES

    def text(self, state: str) -> str:
        """The text of a state, or "" if it is invalid. Raises ValueError if the states are too long."""
        inflater = zlib.decompressobj()
        raw = b""
        try:
            raw = inflater.decompress(base64.urlsafe_b64decode(state), self._left + 1)
            text = raw.decode() if inflater.eof else ""
        except (ValueError, zlib.error):
            text = ""
        if len(raw) > self._left:
            raise ValueError("the reasoning states are too long")
        self._left -= len(raw)
        return text


def _labelled(content: Any) -> Any:
    """The content of a developer message, which SGLang labels and passes to the model as a system message."""
    if isinstance(content, str):
        return f"{_DEVELOPER_LABEL}\n{content}"
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if isinstance(part.get("text"), str):
            labelled = part | {"text": f"{_DEVELOPER_LABEL}\n{part['text']}"}
            return [*content[:index], labelled, *content[index + 1 :]]
    return [{"type": "input_text", "text": _DEVELOPER_LABEL}, *content]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text", "")}
    if kind == "input_image":
        url = part.get("image_url")
        return {"type": "image_url", "image_url": url if isinstance(url, dict) else {"url": url}}
    return part


def _merged(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with consecutive messages of the assistant merged into one, unless their phases differ."""
    runs: list[list[dict[str, Any]]] = []
    fields: set[str] = set()
    for message in messages:
        previous = runs[-1][-1] if runs else {}
        if message.get("role") == previous.get("role") == "assistant" and (
            previous.get("phase") == message.get("phase") or fields == {"role", "reasoning_content"}
        ):
            runs[-1].append(message)
            fields |= _added_fields(message)
        else:
            runs.append([message])
            fields = set(message)
    return [_joined(run) for run in runs]


def _added_fields(message: dict[str, Any]) -> set[str]:
    """The fields that a message adds to the one that it is merged into."""
    names = ("phase", "content", "tool_calls", "reasoning_content")
    return {name for name in names if (value := message.get(name)) or (name == "content" and value == [])}


def _joined(run: list[dict[str, Any]]) -> dict[str, Any]:
    """One message for consecutive messages of the assistant. Other fields are those of the first message."""
    if len(run) == 1:
        return run[0]
    joined = dict(run[0])
    if (phase := run[-1].get("phase")) is not None:
        joined["phase"] = phase
    contents: list[str | list[dict[str, Any]]] = []
    for message in run:
        content = message.get("content")
        if content:
            contents.append(content)
        elif content is not None and content != "":  # an empty list replaces the content before it
            contents.clear()
            joined["content"] = content
    if contents:
        joined["content"] = _joined_contents(contents)
    if calls := [call for message in run for call in message.get("tool_calls") or ()]:
        joined["tool_calls"] = calls
    if reasoning := [text for message in run if (text := message.get("reasoning_content"))]:
        joined["reasoning_content"] = "\n".join(reasoning)
    return joined


def _joined_contents(contents: list[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """The texts as one text; if there are parts too, the parts, preceded by the texts before the first of them."""
    texts: list[str] = []
    for content in contents:
        if not isinstance(content, str):
            break
        texts.append(content)
    others = contents[len(texts) :]
    text = "\n\n".join(texts)
    if not others:
        return text
    return [part for content in ([text] if text else []) + others for part in _as_parts(content)]


def _as_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_one_system_message(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the texts of all system messages in one system message at the beginning."""
    texts: list[str] = []
    others = []
    for message in messages:
        if message.get("role") != "system":
            others.append(message)
        elif isinstance(content := message.get("content"), str):
            texts.append(content)
        else:
            texts += [part["text"] for part in content or () if isinstance(part.get("text"), str)]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def _tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    """The function for a tool, or None for a tool that is not passed to the model."""
    kind, name = tool["type"], tool.get("name")
    if kind == "shell":
        raise ValueError("shell tools are not supported")
    description, parameters = tool.get("description"), tool.get("parameters")
    if kind == "custom" and name:
        description, parameters = _custom_description(description, tool.get("format")), _CUSTOM_PARAMETERS
    elif kind != "function":
        return None
    elif not name:
        raise ValueError("a function has no name")
    function = {
        "name": name,
        "description": description,
        "parameters": parameters,
        "strict": tool.get("strict", False),
    }
    return {"type": "function", "function": function}


_CUSTOM_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of the function by which SGLang replaces a custom tool, whose input is a text."""


def _custom_description(description: str | None, form: dict[str, Any] | None) -> str | None:
    parts = [description] if description else []
    if form is not None and form.get("type") == "grammar":
        syntax, definition = form.get("syntax") or "lark", form.get("definition") or ""
        parts.append(f"The payload must conform to this {syntax} grammar:\n{definition}")
    return "\n\n".join(parts) or None


def _tool_choice(choice: Any, tools: list[dict[str, Any]]) -> Any:
    if isinstance(choice, dict):
        name = choice.get("name") or (choice.get("function") or {}).get("name")
        if choice.get("type") not in ("function", "custom") or not name:
            choice = "auto"
        elif all(tool["function"]["name"] != name for tool in tools):
            raise ValueError("the chosen tool is not among the tools")
        else:
            return {"type": "function", "function": {"name": name}}
    if choice not in ("auto", "required", "none"):
        raise ValueError(f"unknown tool choice {choice!r}")
    if choice == "required" and not tools:
        raise ValueError("the tool choice requires a tool")
    return choice if tools else "none"


def _variables(body: dict[str, Any]) -> dict[str, Any]:
    """The chat template's variables: thinking is disabled if `reasoning.effort` is "none"."""
    variables: dict[str, Any] = body.get("chat_template_kwargs") or {}
    reasoning = body.get("reasoning") or {}
    if (reasoning.get("effort") or reasoning.get("reasoning_effort")) == "none":
        return {"thinking": False, "enable_thinking": False} | variables
    return variables
