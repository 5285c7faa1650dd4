"""The gateway's decision log as a workload. docs/gateway.md describes the log's fields.

This module performs no I/O.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dps_gateway.acceptance import Acceptance
from dps_lab.simulate.adaptive_drafts import acceptance_probability
from dps_lab.simulate.roofline import ALGORITHMS
from dps_lab.simulate.trace import SessionTrace, TraceError, TurnLengths, describe

DRAFTS: Final = ALGORITHMS["STANDALONE"]
"""The drafts that the engines of a log are assumed to have verified."""


class LoggedTurn(BaseModel):
    """The fields of an entry that a simulation needs. Times are in seconds since the Unix epoch."""

    model_config = ConfigDict(frozen=True)

    time: float
    session: str
    turn: int
    prompt_tokens: Annotated[int, Field(gt=0)]
    output_tokens: Annotated[int, Field(ge=0)]
    total_seconds: Annotated[float, Field(ge=0)]
    verifications: Annotated[int | None, Field(ge=0)] = None


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
    unknown. The think time before a turn is the time since the end of the previous answer. A session's acceptance is
    that of its answers with drafts; the fewer there are, the closer it is to that of the whole log.

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
    everything = _drafted(turn for each in complete for turn in each)
    return [_session(each, each[0].time - start, everything) for each in complete]


def _drafted(turns: Iterable[LoggedTurn]) -> Acceptance:
    """The tokens and the verifications of the answers with drafts."""
    drafted = [turn for turn in turns if turn.verifications]
    tokens = sum(turn.output_tokens for turn in drafted)
    return Acceptance(float(tokens), float(sum(turn.verifications or 0 for turn in drafted)))


def _acceptance(session: Acceptance, everything: Acceptance) -> float | None:
    """The probability that a draft token is accepted; None if no answer of the log had drafts."""
    if not everything.verifications:
        return None
    tokens = session.expected_tokens(everything.tokens / everything.verifications, turn=1)
    return round(acceptance_probability(replace(DRAFTS, acceptance_length=tokens)), 3)


def _session(turns: list[LoggedTurn], arrival: float, everything: Acceptance) -> SessionTrace:
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
    acceptance = _acceptance(_drafted(turns), everything)
    return SessionTrace(id=turns[0].session, arrival_seconds=arrival, acceptance=acceptance, turns=lengths)
