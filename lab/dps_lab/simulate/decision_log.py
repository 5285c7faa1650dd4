"""The gateway's decision log as a workload. docs/gateway.md describes the log's fields.

This module performs no I/O.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dps_lab.simulate.trace import SessionTrace, TraceError, TurnLengths, describe


class LoggedTurn(BaseModel):
    """The fields of an entry that a simulation needs. Times are in seconds since the Unix epoch."""

    model_config = ConfigDict(frozen=True)

    time: float
    session: str
    turn: int
    prompt_tokens: Annotated[int, Field(gt=0)]
    output_tokens: Annotated[int, Field(ge=0)]
    total_seconds: Annotated[float, Field(ge=0)]


def is_decision_log(line: str) -> bool:
    """Whether a line of a file is an entry of a decision log, not a session of a trace."""
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return isinstance(entry, dict) and "session" in entry and "turns" not in entry


def parse_decision_log(lines: Iterable[str], name: str) -> list[SessionTrace]:
    """The sessions of a decision log, in order of arrival; the first arrives at 0.

    A session whose first turn is not in the log is left out, because the growth of its first logged prompt would be
    unknown. The think time before a turn is the time since the end of the previous answer.

    Raises TraceError for the first line that is not an entry, and if no session is complete.
    """
    turns: dict[str, list[LoggedTurn]] = defaultdict(list)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                turn = LoggedTurn.model_validate_json(line)
            except ValidationError as error:
                raise TraceError(f"{name}, line {number}: {describe(error)}") from None
            turns[turn.session].append(turn)
    sessions = [sorted(each, key=lambda turn: turn.time) for each in turns.values()]
    complete = sorted((each for each in sessions if each[0].turn == 1), key=lambda each: each[0].time)
    if not complete:
        raise TraceError(f"{name}: the decision log has the first turn of no session; use a longer log")
    start = complete[0][0].time
    return [_session(each, each[0].time - start) for each in complete]


def _session(turns: list[LoggedTurn], arrival: float) -> SessionTrace:
    ended = turns[0].time
    lengths = []
    for turn in turns:
        lengths.append(
            TurnLengths(
                prompt_tokens=turn.prompt_tokens,
                output_tokens=max(1, turn.output_tokens),
                think_seconds=max(0.0, turn.time - ended),
            )
        )
        ended = turn.time + turn.total_seconds
    return SessionTrace(id=turns[0].session, arrival_seconds=arrival, turns=lengths)
