"""Removing the parts of system prompts that change with every request. This module performs no I/O.

A prompt that changes at its front grows from no earlier prompt, and no engine finds any of it in its prefix cache. vLLM
removes Claude Code's header in the same way (`entrypoints/anthropic/serving.py`); SGLang does not.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

Patterns = Sequence[re.Pattern[str]]

_SYSTEM_ROLES: Final = ("system", "developer")
_TEXT_PARTS: Final = ("text", "input_text")


def without_volatile_parts(body: dict[str, Any], patterns: Patterns) -> tuple[dict[str, Any], int]:
    """The request without the matches of `patterns` in its system prompts, and the number of texts that had matches.

    System prompts are Anthropic's `system`, the Responses API's `instructions`, and the messages and input items of the
    roles `system` and `developer`. A block of text of which nothing remains is removed. The given request is not
    changed, and is returned if nothing matches.
    """
    changes: dict[str, Any] = {}
    removed = 0
    for field in ("system", "instructions", "messages", "input"):
        cleaned = _cleaned if field in ("system", "instructions") else _cleaned_messages
        content, matches = cleaned(body.get(field), patterns)
        if matches:
            changes[field] = content
            removed += matches
    return (body | changes, removed) if removed else (body, 0)


def _cleaned_messages(messages: Any, patterns: Patterns) -> tuple[Any, int]:
    """Messages without the matches in those of the system. Values that the engine will refuse are kept."""
    if not isinstance(messages, list):
        return messages, 0
    cleaned, removed = [], 0
    for message in messages:
        if isinstance(message, dict) and message.get("role") in _SYSTEM_ROLES:
            content, matches = _cleaned(message.get("content"), patterns)
            if matches:
                message = message | {"content": content}
                removed += matches
        cleaned.append(message)
    return cleaned, removed


def _cleaned(content: Any, patterns: Patterns) -> tuple[Any, int]:
    """A text or a list of parts without the matches, and the number of texts that had matches."""
    if isinstance(content, str):
        text = content
        for pattern in patterns:
            text = pattern.sub("", text)
        return text, int(text != content)
    if not isinstance(content, list):
        return content, 0
    cleaned, removed = [], 0
    for part in content:
        if isinstance(part, dict) and part.get("type") in _TEXT_PARTS:
            text, matches = _cleaned(part.get("text"), patterns)
            if matches:
                removed += 1
                if not text:
                    continue
                part = part | {"text": text}
        cleaned.append(part)
    return cleaned, removed
