"""Length traces: the input of `dps simulate`. JSONL, one session per line, lengths in tokens only.

docs/lab.md describes the format for users; this module is its definition.
"""

import reprlib
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Tokens = Annotated[int, Field(ge=0)]
PositiveTokens = Annotated[int, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TraceError(ValueError):
    """The trace is invalid. The message names the file, the line and the field, and states what to change."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TurnLengths(_Record):
    """One request: the length of its whole prompt (L_t) and of its answer, in tokens.

    `think_seconds` is how long the client waits between the previous answer and this request. `acceptance` replaces
    that of the session.
    """

    prompt_tokens: PositiveTokens
    output_tokens: PositiveTokens
    think_seconds: Seconds = 0.0
    acceptance: Probability | None = None


class SessionTrace(_Record):
    """One session. Sessions with the same `prefix` share their first `prefix_tokens` tokens.

    `arrival_seconds` is when the session starts; null if the load options decide. `acceptance` is the probability that
    a draft token is accepted if the previous ones were; null for the engine's mean number of tokens per verification.
    """

    id: Annotated[str, Field(min_length=1)]
    prefix: str | None = None
    prefix_tokens: Tokens = 0
    arrival_seconds: Seconds | None = None
    acceptance: Probability | None = None
    turns: Annotated[list[TurnLengths], Field(min_length=1)]

    @property
    def output_tokens(self) -> int:
        """Tokens generated over the whole session."""
        return sum(turn.output_tokens for turn in self.turns)

    def base_tokens(self) -> list[int]:
        """L_{t-1} of each turn, so that the rest of its prompt is ΔL_t (paper, Eq. 1).

        It is 0 for the first turn, and if the history was rewritten: the prompt is shorter than the previous one.
        """
        lengths = [0, *(turn.prompt_tokens for turn in self.turns)]
        return [previous if previous <= length else 0 for previous, length in pairwise(lengths)]


def parse_trace(lines: Iterable[str], name: str = "trace") -> list[SessionTrace]:
    """Parse the sessions of JSONL text; blank lines are skipped.

    Raises TraceError for the first line that is not a session, for an id that occurs twice, for a prefix
    that is longer than a prompt, and if there is no session at all.
    """
    sessions: list[SessionTrace] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            session = SessionTrace.model_validate_json(line)
        except ValidationError as error:
            raise TraceError(f"{where}: {describe(error)}") from None
        if session.id in line_of:
            raise TraceError(
                f"{where}: id: '{session.id}' is already used on line {line_of[session.id]}; "
                "give every session a unique id"
            )
        line_of[session.id] = number
        _check_prefix(session, where)
        sessions.append(session)
    if not sessions:
        raise TraceError(f"{name}: the file contains no sessions; write one JSON object per line")
    return sessions


def _check_prefix(session: SessionTrace, where: str) -> None:
    if session.prefix is None:
        return
    for index, turn in enumerate(session.turns):
        if session.prefix_tokens > turn.prompt_tokens:
            raise TraceError(
                f"{where}: prefix_tokens: {session.prefix_tokens} is more than turns[{index}].prompt_tokens "
                f"({turn.prompt_tokens}); a shared prefix is part of every prompt of its session"
            )


def describe(error: ValidationError) -> str:
    """The first problem of an invalid line: the field, and the correction."""
    detail: Mapping[str, Any] = error.errors(include_url=False)[0]
    if detail["type"] == "json_invalid":
        return f"the line is not valid JSON ({detail['ctx']['error']}); write one JSON object per line"
    if not detail["loc"]:
        return "the line is not a JSON object; write one JSON object per line"
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(
        "."
    )
    if detail["type"] == "missing":
        return f"{field}: the field is missing; add it"
    if detail["type"] == "extra_forbidden":
        known = TurnLengths if "turns" in detail["loc"] else SessionTrace
        return f"{field}: unknown field; remove it or use one of {', '.join(known.model_fields)}"
    return f"{field}: {detail['msg']}, got {reprlib.repr(detail['input'])}"
