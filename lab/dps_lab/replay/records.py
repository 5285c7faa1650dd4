"""The records of a replay, one per turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """The gateway's decision for a turn, from its `x-dps-*` response headers. Lengths are in tokens.

    A field is None if the header is missing, because sessions can be replayed against any OpenAI-compatible server.
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
        """The decision in these response headers. `headers` must be case-insensitive or have lower-case names."""
        values = {field.name: headers.get(f"x-dps-{field.name.replace('_', '-')}") for field in fields(cls)}
        counts = {name: values[name] for name in ("delta_tokens", "prompt_tokens", "turn")}
        numbers = {name: int(text) if text and text.isdigit() else None for name, text in counts.items()}
        return cls(**values | numbers)  # type: ignore[arg-type] # the names of the numeric fields are above


@dataclass(frozen=True)
class Usage:
    """Token counts reported by the engine."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, usage: Mapping[str, Any]) -> "Usage":
        """Read the usage object of an OpenAI response. Missing counts are 0."""
        details = usage.get("prompt_tokens_details") or {}
        return cls(
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or 0,
            cached_tokens=details.get("cached_tokens") or 0,
        )


@dataclass
class TurnRecord:
    """One turn of a session, over all attempts, to which the client adds while it sends the turn. Times are in seconds.

    url, status: of the last attempt.
    verdict: the decision in the first response headers received, even if that response broke off later.
    unacknowledged: attempts that failed before any headers were received; they may have reached an engine.
    started: time of the first attempt since the replay began.
    ttft: time from the first attempt to the first token.
    latency: time from the first attempt to the end of the answer, including the waits between attempts.
    error: why there is no answer; None if there is one.
    """

    session: str
    turn: int
    url: str
    status: int | None = None
    verdict: Verdict = field(default_factory=Verdict)
    attempts: int = 0
    unacknowledged: int = 0
    started: float = 0.0
    ttft: float | None = None
    latency: float = 0.0
    usage: Usage = field(default_factory=Usage)
    error: str | None = None


@dataclass(frozen=True)
class ReplayResult:
    """The records of a replay, in the order in which turns were completed."""

    planned_turns: int
    wall_seconds: float
    turns: Sequence[TurnRecord] = field(default_factory=tuple)

    @property
    def lost(self) -> int:
        """Planned turns without a complete answer."""
        return self.planned_turns - sum(record.error is None for record in self.turns)

    def by_session(self) -> dict[str, list[TurnRecord]]:
        """The turns of each session, in order."""
        sessions: dict[str, list[TurnRecord]] = {}
        for record in self.turns:
            sessions.setdefault(record.session, []).append(record)
        return sessions
