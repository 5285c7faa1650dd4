"""Recorded sessions: what a client sent, turn by turn, and what it was answered. One JSON object a line.

docs/replay.md describes the format for people; this module is its definition.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Message = dict[str, Any]
"""A chat message as the OpenAI API has it: `role`, `content`, `tool_calls`, `tool_call_id`, ..."""


class SessionFormatError(ValueError):
    """A line is not a session; the message names the file, the line and the key."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Turn(_Record):
    """One request of a session.

    messages: what the client adds to the history for this request (a user message, tool results, ...).
    answer: the recorded assistant message, which the next turn's history contains.
    think_seconds: how long the client waits before it sends this turn. max_tokens: its bound on the answer.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    answer: Message
    think_seconds: Annotated[float, Field(ge=0)] = 0.0
    max_tokens: Annotated[int, Field(gt=0)] | None = None


class Session(_Record):
    """One multi-turn session: turns in order, with the tools and the system prompt they all share."""

    id: Annotated[str, Field(min_length=1)]
    tools: list[dict[str, Any]] = []
    system: str | None = None
    turns: Annotated[list[Turn], Field(min_length=1)]

    def opening(self) -> list[Message]:
        """The history before the first turn: the system prompt, if there is one."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def prompts(self) -> Iterator[list[Message]]:
        """The whole message list of each turn's request when every answer is the recorded one."""
        history = self.opening()
        for turn in self.turns:
            history = [*history, *turn.messages]
            yield history
            history = [*history, turn.answer]


def parse_sessions(lines: Iterable[str], name: str = "sessions") -> list[Session]:
    """Sessions of JSONL text; blank lines are skipped.

    Raises SessionFormatError for a line that is not a session, and for an id that occurs twice.
    """
    sessions: list[Session] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            session = Session.model_validate_json(line)
        except ValidationError as error:
            raise SessionFormatError(f"{name}, line {number}: {_first(error)}") from None
        if session.id in seen:
            raise SessionFormatError(
                f"{name}, line {number}: id: '{session.id}' is already that of line {seen[session.id]}"
            )
        seen[session.id] = number
        sessions.append(session)
    return sessions


def load_sessions(path: Path) -> list[Session]:
    """Sessions of a JSONL file. Raises SessionFormatError, and OSError for a file that cannot be read."""
    with path.open(encoding="utf-8") as lines:
        return parse_sessions(lines, str(path))


def dump_sessions(sessions: Iterable[Session]) -> str:
    """JSONL text that `parse_sessions` reads back to equal sessions."""
    return "".join(session.model_dump_json(exclude_defaults=True) + "\n" for session in sessions)


def _first(error: ValidationError) -> str:
    detail: Mapping[str, Any] = error.errors(include_url=False, include_input=False)[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(".")
    return f"{key}: {detail['msg']}" if key else str(detail["msg"])
