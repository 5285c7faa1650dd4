"""The gateway's Prometheus metrics: `dps_*`, and those of OpenTelemetry's GenAI semantic conventions."""

from collections.abc import Sequence
from functools import partial
from typing import Final, Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from dps_gateway.pool import Pool

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

disable_created_metrics()  # type: ignore[no-untyped-call]

# fmt: off
TOKEN_BUCKETS: Final = (
    0, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192, 16384, 32768, 131072,
)
"""The thresholds of the paper's Table 3, extended to long contexts."""
OVERHEAD_BUCKETS: Final = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.5, 2.0)
LATENCY_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PER_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
# fmt: on

GENAI_LABELS: Final = ("gen_ai_operation_name", "gen_ai_request_model")

M = TypeVar("M", Counter, Gauge, Histogram)


class Labelled(Generic[M]):
    """A metric with labels. Caches its children, which the library looks up under a lock on every call."""

    def __init__(self, metric: M) -> None:
        self._metric: M = metric
        self._children: dict[tuple[str, ...], M] = {}

    def labels(self, *values: str) -> M:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*values)
        return child


class Metrics:
    """The metrics of one gateway replica."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        # Metrics without labels.
        count, value = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        tokens = partial(Histogram, buckets=TOKEN_BUCKETS, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Labelled[Counter]:
            return Labelled(Counter(name, text, labels, registry=registry))

        def gauge(name: str, text: str) -> Labelled[Gauge]:
            return Labelled(Gauge(name, text, ("pool",), registry=registry))

        def histogram(
            name: str, text: str, *labels: str, buckets: Sequence[float] = LATENCY_BUCKETS
        ) -> Labelled[Histogram]:
            return Labelled(Histogram(name, text, labels or ("pool",), buckets=buckets, registry=registry))

        # Turns
        self.decisions = counter("dps_route_decisions", "Turns routed, by pool and reason", "pool", "reason")
        self.history = counter(
            "dps_history", "Turns, by their prompt's relation to the session's history", "kind"
        )
        self.delta_tokens = tokens(
            "dps_delta_tokens",
            "Tokens that a prompt adds to the longest earlier prompt of its session that it continues (ΔL)",
        )
        self.prompt_tokens = tokens("dps_prompt_tokens", "Prompt length in tokens (L)")
        self.volatile_parts = count(
            "dps_volatile_prompt_parts",
            "Texts of system prompts from which parts were removed, because they change with every request",
        )
        self.token_count_mismatch = count(
            "dps_token_count_mismatch", "Turns whose prompt length differs from the engine's prompt_tokens"
        )
        self.cached_tokens = counter(
            "dps_cached_tokens", "Prompt tokens that engines found in their KV cache", "pool"
        )
        self.prompt_sources = counter(
            "dps_prompt_tokens_by_source", "Prompt tokens, by the source of their KV", "pool", "source"
        )
        self.fetchable_tokens = counter(
            "dps_fetchable_tokens",
            "Prompt tokens that a pool could fetch, according to sessions' records",
            "pool",
        )
        self.verifications = counter(
            "dps_draft_verifications", "Verifications of drafts, as engines report them", "pool"
        )
        self.verified_tokens = counter(
            "dps_verified_tokens", "Output tokens of the answers with reported verifications", "pool"
        )
        self.prediction_error = histogram(
            "dps_prediction_error_seconds",
            "Absolute difference between the predicted and the actual duration of a turn",
        )
        self.estimated_regret = count(
            "dps_estimated_regret_seconds",
            "Seconds by which turns took longer than was predicted for the other pool",
        )

        # Requests
        self.requests = counter("dps_requests", "Requests answered, by route and status", "route", "status")
        self.overhead = Histogram(
            "dps_gateway_overhead_seconds",
            "Time the gateway adds before the upstream request is sent",
            buckets=OVERHEAD_BUCKETS,
            registry=registry,
        )
        self.queue_time = histogram(
            "dps_queue_seconds", "Time a request waited for a free replica of its pool"
        )
        self.time_to_first_token = histogram(
            "dps_time_to_first_token_seconds", "Time from a request's arrival to the first byte of its answer"
        )
        self.time_per_output_token = histogram(
            "dps_time_per_output_token_seconds",
            "Time per output token after the first, of streamed answers",
            buckets=PER_TOKEN_BUCKETS,
        )
        self.buffered_bytes = value("dps_buffered_bytes", "Size of the bodies of the requests in progress")
        self.upstream_failures = counter(
            "dps_upstream_failures", "Upstream attempts that failed, by kind", "pool", "kind"
        )
        self.continuations = counter(
            "dps_stream_continuations",
            "Streams of plain text whose engine failed, by whether another engine continued them",
            "outcome",
        )

        # Pools
        self.in_flight = gauge("dps_in_flight", "Requests in flight to engines")
        self.queued = gauge("dps_queued", "Requests waiting for a free replica")
        self.demand = gauge("dps_demand", "Requests in flight to engines or waiting for a free replica")
        self.ready_replicas = gauge("dps_ready_replicas", "Ready engine replicas")
        self.pool_unavailable = counter(
            "dps_pool_unavailable", "Requests whose chosen pool had no ready replica", "pool"
        )
        for pool in Pool:
            # PromQL's increase() ignores the first value of a series, so the series begin at zero.
            self.pool_unavailable.labels(pool.value)

        # The gateway itself
        self.state_degraded = value(
            "dps_state_degraded", "1 while session state is not being written to Redis"
        )
        self.state_errors = counter("dps_state_errors", "Redis calls that failed, by kind", "kind")
        self.config_reloads = counter(
            "dps_config_reloads", "Reloads of the configuration file, by outcome", "outcome"
        )
        self.config_valid = value(
            "dps_config_valid", "0 while the configuration file on disk is invalid and not in use"
        )
        self.config_valid.set(1)
        self.background_failures = counter(
            "dps_background_failures", "Background tasks that ended and were restarted", "task"
        )
        self.access_log_dropped = count(
            "dps_access_log_dropped", "Entries of the access log that could not be written"
        )
        self.decision_log_dropped = count(
            "dps_decision_log_dropped", "Entries of the decision log that could not be written"
        )

        # OpenTelemetry's semantic conventions
        self.genai_duration = histogram(
            "gen_ai_server_request_duration_seconds", "GenAI server request duration", *GENAI_LABELS
        )
        self.genai_first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds", "GenAI server time to first token", *GENAI_LABELS
        )
        self.genai_token_usage = histogram(
            "gen_ai_client_token_usage",
            "GenAI tokens used, by type",
            *GENAI_LABELS,
            "gen_ai_token_type",
            buckets=TOKEN_BUCKETS,
        )

    def render(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)
