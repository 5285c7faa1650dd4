"""Named workloads: length traces that come with the package. Their sources are in docs/lab.md."""

import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Final

from dps_lab.simulate.decision_log import is_decision_log, parse_decision_log
from dps_lab.simulate.gateway_logs import read_decision_logs
from dps_lab.simulate.trace import SessionTrace, TraceError, TurnLengths, parse_trace
from dps_lab.workload.toolbench import toolbench_shaped

LENGTHS: Final = {"bfcl": "bfcl.jsonl", "tau-bench": "tau-bench.jsonl", "mooncake": "mooncake.jsonl"}

WORKLOADS: Final = (*LENGTHS, "toolbench")

TOOLBENCH_OUTPUT_TOKENS: Final = 111
"""Mean answer length of the ToolBench-shaped workload; the paper reports none. See docs/measurements.md."""

Mixture = Mapping[tuple[float, ...], float]
"""Shares of the sessions by their acceptance probabilities: that of equal parts of the session's turns, in order."""

_OUTPUT_SPREAD: Final = 0.5
"""Standard deviation of the logarithm of an answer's length."""


def load_workload(name: str) -> list[SessionTrace]:
    """The sessions of one of WORKLOADS, a trace file, or a decision log (a file, or an admin port's URL).

    Raises TraceError if the file is neither, if there is no such workload and no such file, or if a gateway does not
    return its decision log.
    """
    if name.startswith("http://"):
        return parse_decision_log(read_decision_logs(name), name)
    if name in LENGTHS:
        return parse_trace(_lines(Path(str(files("dps_lab"))) / "data" / "lengths" / LENGTHS[name]), name)
    if name == "toolbench":
        return toolbench_trace()
    lines = _lines(Path(name))
    first = next((line for line in lines if line.strip()), "")
    return parse_decision_log(lines, name) if is_decision_log(first) else parse_trace(lines, name)


def _lines(path: Path) -> list[str]:
    """The lines of a file, which is read once because it may be a pipe. Raises TraceError."""
    try:
        with path.open(encoding="utf-8-sig") as lines:
            return list(lines)
    except FileNotFoundError:
        raise TraceError(
            f"there is no workload and no file '{path}'; choose {', '.join(WORKLOADS)}, or the path of a "
            "JSONL trace or of a decision log, or the URL of a gateway's decision log"
        ) from None
    except UnicodeDecodeError as error:
        raise TraceError(
            f"{path}: the file is not UTF-8 text ({error.reason}); convert it to UTF-8"
        ) from None
    except OSError as error:
        raise TraceError(
            f"{path}: the file cannot be read ({error.strerror}); check its path and its permissions"
        ) from None


def toolbench_trace() -> list[SessionTrace]:
    """Synthetic sessions with the ΔL and L that the paper reports for ToolBench (section 4.4, Table 3).

    Answer lengths are drawn from a log-normal distribution; an answer is shorter than the growth of the next
    prompt, which contains it.
    """
    rng = random.Random("0/outputs")
    return [
        SessionTrace(id=f"toolbench_shaped_{number}", turns=_turns(deltas, TOOLBENCH_OUTPUT_TOKENS, rng))
        for number, deltas in enumerate(toolbench_shaped())
    ]


def mixed(
    sessions: Sequence[SessionTrace], mixture: Mixture, seed: int, applications: bool = False
) -> list[SessionTrace]:
    """The sessions with acceptance probabilities in these shares, which are assigned at random.

    The probabilities of the workload are replaced. applications: whether the prompts of sessions of different shares
    begin differently.
    """
    order = list(range(len(sessions)))
    random.Random(f"{seed}/acceptance").shuffle(order)
    limits = [share / sum(mixture.values()) * len(order) for share in accumulate(mixture.values())]
    drawn = [bisect(limits[:-1], rank + 0.5) for rank in order]
    return [
        session.model_copy(
            update={
                "prefix": f"{session.prefix or ''} {share}" if applications else session.prefix,
                "turns": _with_acceptance(session.turns, list(mixture)[share]),
            }
        )
        for session, share in zip(sessions, drawn, strict=True)
    ]


def _with_acceptance(turns: Sequence[TurnLengths], parts: tuple[float, ...]) -> list[TurnLengths]:
    return [
        turn.model_copy(update={"acceptance": parts[index * len(parts) // len(turns)]})
        for index, turn in enumerate(turns)
    ]


def _turns(deltas: Sequence[int], mean: float, rng: random.Random) -> list[TurnLengths]:
    turns = []
    length = 0
    for index, delta in enumerate(deltas):
        length += delta
        drawn = mean * rng.lognormvariate(-(_OUTPUT_SPREAD**2) / 2, _OUTPUT_SPREAD)
        room = deltas[index + 1] - 1 if index + 1 < len(deltas) else drawn
        turns.append(TurnLengths(prompt_tokens=length, output_tokens=max(1, round(min(drawn, room)))))
    return turns
