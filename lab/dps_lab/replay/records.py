"""What a replay saw: one record a turn."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """The gateway's decision for a turn, as its `x-dps-*` response headers tell it (lengths in tokens).

    Every field is None where the server sends no such header: it may be any OpenAI-compatible server.
    """

    pool: str | None = None
    reason: str | None = None
    delta_tokens: int | None = None
    prompt_tokens: int | None = None
    turn: int | None = None
    history: str | None = None
    state: str | None = None

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "Verdict":
        """The decision in these response headers, whose names are looked up in lower case."""

        def number(name: str) -> int | None:
            value = headers.get(name)
            return int(value) if value is not None and value.isdigit() else None

        return cls(
            pool=headers.get("x-dps-pool"),
            reason=headers.get("x-dps-reason"),
            delta_tokens=number("x-dps-delta-tokens"),
            prompt_tokens=number("x-dps-prompt-tokens"),
            turn=number("x-dps-turn"),
            history=headers.get("x-dps-history"),
            state=headers.get("x-dps-state"),
        )


@dataclass(frozen=True)
class Usage:
    """Tokens as the engine counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> "Usage":
        """The usage object of an OpenAI response; what is missing counts 0."""
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
            cached_tokens=details.get("cached_tokens") or 0,
        )


@dataclass(frozen=True)
class TurnRecord:
    """One turn of one session, all attempts at it together. Times in seconds.

    verdict: the decision in the first response headers that were seen, even if that response broke later.
    blind: attempts that broke before that, of which nobody knows whether they reached an engine.
    started: when the turn was first sent, since the replay began. latency: from then until the whole answer
    was there, waiting between attempts included. url, status: of the last attempt. error: why there is none.
    """

    session: str
    turn: int
    url: str
    status: int | None
    verdict: Verdict
    attempts: int
    blind: int
    started: float
    ttft: float | None
    latency: float
    usage: Usage
    error: str | None = None


@dataclass(frozen=True)
class ReplayResult:
    """Everything a replay saw, in the order in which turns ended."""

    label: str
    planned_turns: int
    wall_seconds: float
    turns: Sequence[TurnRecord] = field(default_factory=tuple)

    def by_session(self) -> dict[str, list[TurnRecord]]:
        """Each session's turns, in order."""
        sessions: dict[str, list[TurnRecord]] = {}
        for record in self.turns:
            sessions.setdefault(record.session, []).append(record)
        return sessions

    def as_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return asdict(self)
