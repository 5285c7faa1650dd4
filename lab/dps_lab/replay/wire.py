"""Read a chat completion, streamed or not, from an OpenAI-compatible server."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from dps_lab.replay.records import Usage
from dps_lab.workload.sessions import Message


class BrokenAnswerError(Exception):
    """An answer is incomplete, is not a chat completion, or contains an error event."""


@dataclass
class Answer:
    """An assistant message, possibly still incomplete, and the engine's usage."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)

    def message(self) -> Message:
        """The message as part of the next turn's history."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.content}
        return {"role": "assistant", "content": self.content or None, "tool_calls": self.tool_calls}

    def add(self, delta: dict[str, Any]) -> bool:
        """Add a chunk's delta. Returns whether it had visible content or tool calls."""
        text = delta.get("content") or ""
        self.content += text
        calls = delta.get("tool_calls") or []
        for part in calls:
            index = part.get("index", len(self.tool_calls))
            while index >= len(self.tool_calls):
                self.tool_calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
            call = self.tool_calls[index]
            if part.get("id"):
                call["id"] = part["id"]
            for key, value in (part.get("function") or {}).items():
                call["function"][key] = call["function"].get(key, "") + (value or "")
        return bool(text or calls)


async def read_whole(response: aiohttp.ClientResponse) -> Answer:
    """Read a response without streaming. Raises BrokenAnswerError if it is not a chat completion."""
    try:
        body = json.loads(await response.read())
        message = body["choices"][0]["message"]
    except (ValueError, LookupError, TypeError) as error:
        raise BrokenAnswerError(f"not a chat completion: {error!r}") from None
    return Answer(
        message.get("content") or "", message.get("tool_calls") or [], Usage.of(body.get("usage") or {})
    )


async def read_stream(response: aiohttp.ClientResponse, on_content: Callable[[], None]) -> Answer:
    """Read a streamed response. `on_content` is called for each part with visible content.

    Raises BrokenAnswerError if there is an error event, or if the stream ends without `[DONE]`.
    """
    answer = Answer()
    async for data in _events(response):
        if data == "[DONE]":
            return answer
        try:
            chunk = json.loads(data)
        except ValueError:
            raise BrokenAnswerError(f"not JSON: {data[:80]}") from None
        if "error" in chunk:
            raise BrokenAnswerError(f"error event: {chunk['error']}")
        if chunk.get("usage"):
            answer.usage = Usage.of(chunk["usage"])
        for choice in chunk.get("choices") or []:
            if answer.add(choice.get("delta") or {}):
                on_content()
    raise BrokenAnswerError("the stream ended without [DONE]")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode()
