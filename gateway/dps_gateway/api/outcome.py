"""The outcome of an answered turn: for the policy, the metrics of its predictions, and the decision log."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dps_gateway.api.dispatch import Placed
from dps_gateway.api.routed_request import RoutedRequest
from dps_gateway.engine.dialect import Usage
from dps_gateway.engine.sources import prompt_sources
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import PolicyInput, Reason
from dps_gateway.routing.learning import Observation, learns
from dps_gateway.telemetry.metrics import Metrics
from dps_gateway.turn import MeasuredTurn


@dataclass(frozen=True, slots=True)
class Outcome:
    """A turn whose answer is complete."""

    routed: RoutedRequest
    turn: MeasuredTurn
    policy_input: PolicyInput
    placed: Placed
    usage: Usage
    first_byte: float
    """`time.perf_counter()` at the first byte of the answer."""
    ended: float
    """`time.perf_counter()` at the end of the answer."""

    @property
    def pool(self) -> Pool:
        """The pool that served the turn."""
        return self.placed.pool.name

    def first_token_seconds(self, since: float) -> float | None:
        """Seconds from `since` to the first token; None if the answer was not streamed."""
        return self.first_byte - since if self.placed.answer.streams else None


def record_outcome(
    routed: RoutedRequest, placed: Placed, usage: Usage, first_byte: float, ended: float
) -> None:
    """Record a request whose answer is complete. Requests that are not turns are ignored."""
    if placed.answer.status != 200 or routed.turn is None or routed.policy_input is None:
        return
    outcome = Outcome(routed, routed.turn, routed.policy_input, placed, usage, first_byte, ended)
    runtime = routed.call.runtime
    if _comparable(outcome):
        _record_prediction(runtime.metrics, outcome)
        if learns(policy := runtime.policy):
            runtime.learning.observe(policy, _observation(outcome))
    if runtime.decision_log is not None:
        runtime.decision_log.add(_entry(outcome))


def _comparable(outcome: Outcome) -> bool:
    """Whether the turn was served by a single attempt, and by a pool that was ready when the turn was routed.

    SGLang ends an answer early with the finish reason `abort`, for example when it shuts down.
    """
    return (
        not outcome.placed.retried
        and outcome.placed.reason is not Reason.FAILOVER
        and outcome.pool in outcome.policy_input.pools
        and outcome.usage.finish_reason != "abort"
    )


def _record_prediction(metrics: Metrics, outcome: Outcome) -> None:
    predicted = outcome.routed.decision.predicted or {}
    seconds = outcome.ended - outcome.routed.decided_at
    if outcome.pool in predicted:
        metrics.prediction_error.labels(outcome.pool.value).observe(abs(seconds - predicted[outcome.pool]))
    if outcome.pool.other in predicted:
        metrics.estimated_regret.inc(max(0.0, seconds - predicted[outcome.pool.other]))


def _observation(outcome: Outcome) -> Observation:
    """The policy's observation of the turn, with the pool's state when the turn was routed."""
    view, since, usage = outcome.policy_input.pools[outcome.pool], outcome.routed.decided_at, outcome.usage
    return Observation(
        pool=outcome.pool,
        replica=outcome.placed.replica.id,
        prompt_tokens=usage.prompt_tokens,
        delta_tokens=outcome.turn.delta_tokens,
        expected=outcome.turn.cached.tokens(outcome.placed.replica.id, outcome.placed.replica.units),
        cached_tokens=usage.cached_tokens,
        fetched_tokens=usage.fetched_tokens,
        output_tokens=usage.completion_tokens,
        load=view.load,
        queued_prefill_tokens=view.queued_prefill_tokens,
        later_prefill_tokens=outcome.placed.replica.begun_after(outcome.placed.sent_tokens),
        first_token_seconds=outcome.first_token_seconds(since),
        total_seconds=outcome.ended - since,
        number=outcome.turn.number,
    )


def _entry(outcome: Outcome) -> dict[str, Any]:
    """The line of the decision log. docs/gateway.md describes the fields for users."""
    turn, usage, arrived = outcome.turn, outcome.usage, outcome.routed.call.started
    views = outcome.policy_input.pools
    predicted = outcome.routed.decision.predicted
    common = outcome.routed.call.runtime.config.routing.common_prefix_cache
    sources = prompt_sources(usage, common)
    return {
        "time": round(time.time() - (time.perf_counter() - arrived), 6),
        "session": turn.session.id.text,
        "turn": turn.number,
        "history": turn.session.growth.history.value,
        "prompt_tokens": turn.prompt_tokens,
        "delta_tokens": turn.delta_tokens,
        "uncached_tokens": _by_pool({pool: view.prompt.uncached for pool, view in views.items()}),
        "fetchable_tokens": _by_pool({pool: view.prompt.fetchable for pool, view in views.items()}),
        "load": _by_pool({pool: view.load for pool, view in views.items()}),
        "queued_prefill_tokens": _by_pool({pool: view.queued_prefill_tokens for pool, view in views.items()}),
        "predicted_seconds": _by_pool(predicted) if predicted is not None else None,
        "pool": outcome.pool.value,
        "reason": outcome.placed.reason.value,
        "first_token_seconds": _rounded(outcome.first_token_seconds(arrived)),
        "total_seconds": _rounded(outcome.ended - arrived),
        "output_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "fetched_tokens": sources.fetched if sources is not None else None,
    }


def _by_pool(values: Mapping[Pool, float]) -> dict[str, float | None]:
    return {pool.value: _rounded(values[pool]) for pool in Pool if pool in values}


def _rounded(value: float | None) -> float | None:
    """Seconds to the microsecond; more digits would only take up space."""
    return None if value is None else round(value, 6)
