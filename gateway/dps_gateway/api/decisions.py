"""The record of a routing decision and its outcome: for the decision log, and for the page on the admin port."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from opentelemetry.trace import format_trace_id

from dps_gateway.api.call import Call
from dps_gateway.api.outcome import Outcome
from dps_gateway.engine.usage import PromptSources, Usage, prompt_sources
from dps_gateway.pool import Pool
from dps_gateway.prompt.prefixes import Difference
from dps_gateway.routing.decision import Decision, PolicyInput, Reason
from dps_gateway.session.growth import History

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class DecisionRecord:
    """What remains of a request that was routed. It keeps neither the prompt nor the answer in memory."""

    time: float
    """The request's arrival, in seconds since the epoch."""
    request_id: str
    tenant: str
    route: str
    session: str | None
    client_session: str | None
    turn: int | None
    history: History
    changed: Difference | None
    prompt_tokens: int | None
    delta_tokens: int | None
    decision: Decision
    policy_input: PolicyInput | None
    attempt: tuple[Pool, Reason] | None
    replica: str | None
    queue_seconds: float | None
    first_token_seconds: float | None
    total_seconds: float
    usage: Usage | None
    common_prefix_cache: bool
    outcome: Outcome
    status: int
    trace: int

    @property
    def ids(self) -> tuple[str | None, ...]:
        """The ids by which a reader finds the record."""
        return self.session, self.client_session, self.request_id

    @property
    def _sources(self) -> PromptSources | None:
        return prompt_sources(self.usage, self.common_prefix_cache) if self.usage is not None else None

    def entry(self) -> dict[str, Any]:
        """The line of the decision log. docs/gateway.md describes the fields for users."""
        usage, sources = self.usage, self._sources
        views = self.policy_input.pools if self.policy_input is not None else {}
        predicted = self.decision.predicted
        pool, reason = self.attempt or (None, None)
        return {
            "time": round(self.time, 6),
            "session": self.session,
            "turn": self.turn,
            "history": self.history.value,
            "changed": asdict(self.changed) if self.changed else None,
            "prompt_tokens": self.prompt_tokens,
            "delta_tokens": self.delta_tokens,
            "uncached_tokens": _by_pool(views, lambda view: view.prompt.uncached),
            "fetchable_tokens": _by_pool(views, lambda view: view.prompt.fetchable),
            "load": _by_pool(views, lambda view: view.load),
            "queued_prefill_tokens": _by_pool(views, lambda view: view.queued_prefill_tokens),
            "expected_tokens_per_verification": _rounded(self.decision.expected_tokens),
            "predicted_seconds": _by_pool(predicted, lambda seconds: seconds) if predicted else None,
            "pool": pool.value if pool else None,
            "reason": reason.value if reason else None,
            "first_token_seconds": _rounded(self.first_token_seconds),
            "total_seconds": _rounded(self.total_seconds),
            "output_tokens": usage.completion_tokens if usage else None,
            "verifications": usage.verifications if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "fetched_tokens": sources.fetched if sources else None,
        }

    def document(self) -> dict[str, Any]:
        """The entry, and what only those see who may read the admin port."""
        view, sources = self.policy_input, self._sources
        return self.entry() | {
            "request_id": self.request_id,
            "client_session": self.client_session,
            "tenant": self.tenant,
            "route": self.route,
            "replica": self.replica,
            "held_tokens": sources.held if sources else None,
            "computed_tokens": sources.computed if sources else None,
            "queue_seconds": _rounded(self.queue_seconds),
            "last_pool": view.last_pool.value if view and view.last_pool else None,
            "ready_replicas": _by_pool(view.pools, lambda pool: pool.ready_replicas) if view else {},
            "outcome": self.outcome.value,
            "status": self.status,
            "trace": format_trace_id(self.trace) if self.trace else None,
        }


def record_decision(call: Call) -> None:
    """Record a request that has ended, unless it was refused before it was routed."""
    runtime, turn, usage = call.runtime, call.turn, call.usage
    runtime.recent.in_progress.discard(call)
    if call.decision is None:
        return
    now = time.perf_counter()
    first_token_seconds = None
    if call.first_byte_at is not None and call.events is not None:
        first_token_seconds = call.first_byte_at - call.started
    record = DecisionRecord(
        time=time.time() - (now - call.started),
        request_id=call.request_id,
        tenant=call.tenant,
        route=call.request.path,
        session=turn.session.id.text if turn else None,
        client_session=turn.session.client_id if turn else None,
        turn=turn.number if turn else None,
        history=turn.session.growth.history if turn else History.STATELESS,
        changed=turn.difference if turn else None,
        prompt_tokens=call.prompt_tokens,
        delta_tokens=turn.delta_tokens if turn else None,
        decision=call.decision,
        policy_input=call.policy_input,
        attempt=call.attempt,
        replica=call.replica,
        queue_seconds=call.queue_seconds,
        first_token_seconds=first_token_seconds,
        total_seconds=(call.answered_at or now) - call.started,
        usage=usage,
        common_prefix_cache=runtime.config.routing.common_prefix_cache,
        outcome=call.outcome,
        status=call.status,
        trace=call.span.get_span_context().trace_id,
    )
    runtime.recent.add(record)
    if (
        runtime.decision_log is not None
        and call.answered_at is not None
        and call.policy_input is not None
        and usage is not None
        and not usage.several
    ):
        runtime.decision_log.add(record.entry())


def _by_pool(values: Mapping[Pool, T], number: Callable[[T], float]) -> dict[str, float]:
    return {pool.value: round(number(value), 6) for pool, value in values.items()}


def _rounded(value: float | None) -> float | None:
    """Seconds to the microsecond; more digits would only take up space."""
    return None if value is None else round(value, 6)
