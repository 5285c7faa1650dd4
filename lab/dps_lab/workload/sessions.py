"""The format of recorded sessions: JSON Lines with one session per line.

docs/lab.md describes the format; this module defines it.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Message = dict[str, Any]
"""A chat message of the OpenAI API, with `role`, `content`, `tool_calls`, `tool_call_id` and so on."""


class SessionFormatError(ValueError):
    """A file is not text, or a line is not a valid session. The message names the file, the line and the key."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Turn(_Record):
    """One request of a session.

    messages: what the client adds to the history for this request, such as a user message or tool results.
    answer: the recorded assistant message, part of the next turn's history.
    think_seconds: the client's delay before it sends this turn.
    max_tokens: limit on the length of the answer.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    answer: Message
    think_seconds: Annotated[float, Field(ge=0)] = 0.0
    max_tokens: Annotated[int, Field(gt=0)] | None = None


class Session(_Record):
    """A multi-turn session: turns in order, with common tools and system prompt."""

    id: Annotated[str, Field(min_length=1)]
    tools: list[dict[str, Any]] = []
    system: str | None = None
    turns: Annotated[list[Turn], Field(min_length=1)]

    def opening(self) -> list[Message]:
        """The history before the first turn: the system prompt, if any."""
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def prompts(self) -> Iterator[list[Message]]:
        """The complete message list of each turn's request, with recorded answers."""
        history = self.opening()
        for turn in self.turns:
            history = [*history, *turn.messages]
            yield history
            history = [*history, turn.answer]


def parse_sessions(lines: Iterable[str], name: str = "sessions") -> list[Session]:
    """Parse sessions from the lines of a JSONL file. Blank lines are skipped.

    Raises SessionFormatError if a line is not a session, or if an id occurs twice.
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
                f"{name}, line {number}: id: '{session.id}' is already used on line {seen[session.id]}"
            )
        seen[session.id] = number
        sessions.append(session)
    return sessions


def load_sessions(path: Path) -> list[Session]:
    """Load a JSONL file. Raises OSError if it cannot be read, and SessionFormatError if it is invalid."""
    try:
        with path.open(encoding="utf-8") as lines:
            return parse_sessions(lines, str(path))
    except UnicodeDecodeError as error:
        raise SessionFormatError(
            f"{path}: the file is not UTF-8 text ({error.reason}); convert it to UTF-8"
        ) from None


def _first(error: ValidationError) -> str:
    detail: Mapping[str, Any] = error.errors(include_url=False, include_input=False)[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(".")
    return f"{key}: {detail['msg']}" if key else str(detail["msg"])
