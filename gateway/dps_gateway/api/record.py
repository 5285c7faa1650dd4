"""Recording an answer and its usage: in metrics, spans, the policy, and the session's record."""

import logging
from dataclasses import dataclass, replace

from opentelemetry.trace import Span

from dps_gateway.api import spans
from dps_gateway.api.call import Call
from dps_gateway.api.dispatch import Dispatch
from dps_gateway.api.outcome import Outcome
from dps_gateway.engine.usage import PromptSources, Usage, prompt_sources
from dps_gateway.routing.decision import LearningPolicy, Observation, PolicyInput, Reason, decoding_load
from dps_gateway.turn import MeasuredTurn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that has ended. Times are those of `time.perf_counter()`."""

    call: Call
    dispatch: Dispatch
    operation: str
    """The span attribute `gen_ai.operation.name`."""
    usage: Usage | None
    first_byte: float
    ended: float
    continued: bool
    """Whether a second engine has continued the answer, so that its times say nothing about one engine."""

    def first_token_seconds(self, since: float) -> float | None:
        """Seconds from `since` to the first token; None if the answer was not streamed."""
        return self.first_byte - since if self.dispatch.answer.streams else None


async def record_answer(answered: Answered, span: Span) -> None:
    """Record the engine's token counts; on `span`, the CLIENT span of the upstream request, as well."""
    call, pool, usage = answered.call, answered.dispatch.pool, answered.usage
    metrics = call.runtime.metrics
    labels = (answered.operation, call.runtime.config.model.name)
    metrics.genai_duration.labels(*labels).observe(answered.ended - call.started)
    if usage is None or not usage.prompt_tokens:
        return
    call.usage = usage
    first_chunk = answered.first_token_seconds(call.started)
    common = call.runtime.config.routing.common_prefix_cache
    sources = prompt_sources(usage, common)
    spans.describe_usage(span, usage, first_chunk, sources if common else None)
    _count_sources(answered, sources)
    metrics.genai_token_usage.labels(*labels, "input").observe(usage.prompt_tokens)
    metrics.genai_token_usage.labels(*labels, "output").observe(usage.completion_tokens)
    metrics.cached_tokens.labels(pool.name.value).inc(usage.cached_tokens or 0)
    if usage.verifications:
        metrics.verifications.labels(pool.name.value).inc(usage.verifications)
        metrics.verified_tokens.labels(pool.name.value).inc(usage.completion_tokens)
    if usage.several:  # sums show neither the engine's speed nor the length of the session's prompt
        return
    if not answered.continued:
        per_token = None
        if answered.dispatch.answer.streams and usage.completion_tokens > 1:
            per_token = (answered.ended - answered.first_byte) / (usage.completion_tokens - 1)
            metrics.time_per_output_token.labels(pool.name.value).observe(per_token)
        events = call.events.count if call.events is not None else 0
        pool.observe(first_chunk, per_token, usage.completion_tokens / events if events else None)
    if call.turn is not None:
        if call.policy_input is not None and call.outcome is Outcome.COMPLETE:
            usage = _record_turn(answered, usage, call.turn, call.policy_input)
        await _correct(answered, usage, call.turn)


def _count_sources(answered: Answered, sources: PromptSources | None) -> None:
    if sources is None:
        return
    metrics, pool = answered.call.runtime.metrics, answered.dispatch.pool.name
    for name in ("held", "fetched", "computed"):
        metrics.prompt_sources.labels(pool.value, name).inc(getattr(sources, name))
    if (turn := answered.call.turn) is not None:
        fetchable = turn.tokens_on(answered.dispatch.replica).fetchable
        metrics.fetchable_tokens.labels(pool.value).inc(fetchable)


async def _correct(answered: Answered, usage: Usage, turn: MeasuredTurn) -> None:
    call, replica = answered.call, answered.dispatch.replica
    if await call.runtime.turns.correct(
        turn, replica.url, usage, replica.units, continued=answered.continued
    ):
        call.runtime.metrics.token_count_mismatch.inc()
        log.warning(
            "request %s: the gateway counted %d prompt tokens, the engine %d",
            call.request_id,
            turn.prompt_tokens,
            usage.prompt_tokens,
        )


def _record_turn(answered: Answered, usage: Usage, turn: MeasuredTurn, policy_input: PolicyInput) -> Usage:
    """Record a turn for the policy, and for the metrics of its predictions.

    Returns the usage, with the verifications that the policy infers if the engine has reported none.
    """
    runtime, dispatch = answered.call.runtime, answered.dispatch
    if (
        # The turn was served by a single attempt, and by a pool that was ready when the turn was routed.
        not dispatch.retried
        and dispatch.reason is not Reason.FAILOVER
        and dispatch.pool.name in policy_input.pools
    ):
        _record_prediction(answered)
        if isinstance(policy := runtime.policy, LearningPolicy):
            seen = _observation(answered, usage, turn, policy_input)
            verifications = runtime.learning.observe(policy, seen)
            if verifications != usage.verifications:
                return replace(usage, verifications=verifications)
    return usage


def _record_prediction(answered: Answered) -> None:
    call, pool = answered.call, answered.dispatch.pool.name
    predicted = (call.decision.predicted if call.decision is not None else None) or {}
    seconds = answered.ended - call.decided_at
    if pool in predicted:
        call.runtime.metrics.prediction_error.labels(pool.value).observe(abs(seconds - predicted[pool]))
    if pool.other in predicted:
        call.runtime.metrics.estimated_regret.inc(max(0.0, seconds - predicted[pool.other]))


def _observation(
    answered: Answered, usage: Usage, turn: MeasuredTurn, policy_input: PolicyInput
) -> Observation:
    """The policy's observation of the turn, with the pool's state when the turn was routed."""
    dispatch, since = answered.dispatch, answered.call.decided_at
    view, replica = policy_input.pools[dispatch.pool.name], dispatch.replica
    return Observation(
        pool=dispatch.pool.name,
        turn=replace(policy_input, prompt_tokens=usage.prompt_tokens),
        view=replace(view, replica=replica.id, prompt=turn.tokens_on(replica)),
        cached_tokens=usage.cached_tokens,
        fetched_tokens=usage.fetched_tokens,
        output_tokens=usage.completion_tokens,
        decoding_load=decoding_load(dispatch.load_at_start, replica.load),
        later_prefill_tokens=replica.begun_after(dispatch.sent_tokens),
        first_token_seconds=answered.first_token_seconds(since),
        total_seconds=answered.ended - since,
        verifications=usage.verifications,
    )
