"""The outcome of an answered turn, for the decision log."""

import time
from typing import Any

from dps_gateway.api.dispatch import Placed
from dps_gateway.api.job import Job
from dps_gateway.engine.dialect import Usage
from dps_gateway.pool import Pool


def record_outcome(
    job: Job, placed: Placed, usage: Usage, first_token_seconds: float | None, total_seconds: float
) -> None:
    """Record a turn whose answer is complete. Times are in seconds since the request's arrival.

    `first_token_seconds` is None for an answer that was not streamed.
    """
    decisions = job.call.runtime.decision_log
    if decisions is not None and job.turn is not None:
        decisions.add(_entry(job, placed, usage, first_token_seconds, total_seconds))


def _entry(
    job: Job, placed: Placed, usage: Usage, first_token_seconds: float | None, total_seconds: float
) -> dict[str, Any]:
    """The line of the decision log. docs/gateway.md describes the fields for users."""
    turn = job.turn
    assert turn is not None
    growth = turn.session.growth
    return {
        "time": round(time.time() - total_seconds, 6),
        "session": turn.session.id.text,
        "turn": turn.number,
        "history": growth.history.value,
        "prompt_tokens": turn.prompt_tokens,
        "delta_tokens": turn.delta_tokens,
        "uncached_tokens": {pool.value: growth.uncached_tokens(turn.prompt_tokens, pool) for pool in Pool},
        "pool": placed.pool.name.value,
        "reason": placed.reason.value,
        "first_token_seconds": _rounded(first_token_seconds),
        "total_seconds": _rounded(total_seconds),
        "output_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def _rounded(seconds: float | None) -> float | None:
    """Seconds to the microsecond; more digits would only take up space."""
    return None if seconds is None else round(seconds, 6)
