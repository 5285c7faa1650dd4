"""The gateway's Prometheus metrics: `dps_*`, and those of OpenTelemetry's GenAI semantic conventions."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Generic, Literal, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    multiprocess,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from dps_gateway.pool import Pool

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

MultiprocessMode = Literal["livesum", "livemin", "livemax"]
"""How a gauge is aggregated across the running workers."""

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
    """The metrics of one process.

    With several workers, prometheus_client aggregates them through files under PROMETHEUS_MULTIPROC_DIR.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge, histogram = self._counter, self._gauge, self._histogram

        self.decisions = counter("dps_route_decisions", "Turns routed, by pool and reason", "pool", "reason")
        self.history = counter(
            "dps_history", "Turns, by the relation of their prompt to the session's history", "kind"
        )
        self.delta_tokens = self._plain_histogram(
            "dps_delta_tokens",
            "Tokens that a prompt adds to the longest earlier prompt of its session that it continues (ΔL)",
            TOKEN_BUCKETS,
        )
        self.prompt_tokens = self._plain_histogram(
            "dps_prompt_tokens", "Prompt length in tokens (L)", TOKEN_BUCKETS
        )
        self.overhead = self._plain_histogram(
            "dps_gateway_overhead_seconds",
            "Time the gateway adds before the upstream request is sent",
            OVERHEAD_BUCKETS,
        )
        self.queue_time = histogram(
            "dps_queue_seconds",
            "Time a request waited for a free replica of its pool",
            LATENCY_BUCKETS,
            "pool",
        )
        self.time_to_first_token = histogram(
            "dps_time_to_first_token_seconds",
            "Time from a request's arrival to the first byte of its answer",
            LATENCY_BUCKETS,
            "pool",
        )
        self.time_per_output_token = histogram(
            "dps_time_per_output_token_seconds",
            "Time per output token after the first, of streamed answers",
            PER_TOKEN_BUCKETS,
            "pool",
        )
        self.cached_tokens = counter(
            "dps_cached_tokens", "Prompt tokens that the engine found in its KV cache", "pool"
        )
        self.prompt_sources = counter(
            "dps_prompt_tokens_by_source", "Prompt tokens, by the source of their KV", "pool", "source"
        )
        self.fetchable_tokens = counter(
            "dps_fetchable_tokens",
            "Prompt tokens that a pool could fetch, according to sessions' records",
            "pool",
        )
        self.in_flight = gauge("dps_in_flight", "Requests in flight to engines", "livesum", "pool")
        self.queued = gauge("dps_queued", "Requests waiting for a free replica", "livesum", "pool")
        self.demand = gauge(
            "dps_demand", "Requests in flight to engines or waiting for a free replica", "livesum", "pool"
        )
        self.pool_unavailable = counter(
            "dps_pool_unavailable", "Requests whose chosen pool had no ready replica", "pool"
        )
        for pool in Pool:
            # PromQL's increase() ignores the first value of a series, so the series begin at zero.
            self.pool_unavailable.labels(pool.value)
        self.ready_replicas = gauge("dps_ready_replicas", "Ready engine replicas", "livemin", "pool")
        self.requests = counter("dps_requests", "Requests answered, by route and status", "route", "status")
        self.client_connections = self._plain_gauge(
            "dps_client_connections", "Open connections of clients", "livesum"
        )
        self.buffered_bytes = self._plain_gauge(
            "dps_buffered_bytes", "Size of the bodies of the requests in progress", "livesum"
        )
        self.client_connections_closed = counter(
            "dps_client_connections_closed", "Client connections that the gateway closed, by reason", "reason"
        )
        self.admin_connections_closed = counter(
            "dps_admin_connections_closed",
            "Connections to the admin port that the gateway closed, by reason",
            "reason",
        )
        self.upstream_failures = counter(
            "dps_upstream_failures", "Upstream attempts that failed, by kind", "pool", "kind"
        )
        self.continuations = counter(
            "dps_stream_continuations",
            "Deterministic streams whose engine failed, by whether another engine continued them",
            "outcome",
        )
        self.state_degraded = self._plain_gauge(
            "dps_state_degraded", "1 while session state is not being written to Redis", "livemax"
        )
        self.state_errors = counter("dps_state_errors", "Redis calls that failed, by kind", "kind")
        self.invalid_peer_entries = self._plain_counter(
            "dps_invalid_peer_entries", "Entries of session state from peers that were not valid"
        )
        self.token_count_mismatch = self._plain_counter(
            "dps_token_count_mismatch", "Turns whose prompt length differs from the engine's prompt_tokens"
        )
        self.config_reloads = counter(
            "dps_config_reloads", "Reloads of the configuration file, by outcome", "outcome"
        )
        self.config_valid = self._plain_gauge(
            "dps_config_valid", "0 while the configuration file on disk is invalid and not in use", "livemin"
        )
        self.config_valid.set(1)
        self.background_failures = counter(
            "dps_background_failures", "Background tasks that ended and were restarted", "task"
        )
        self.prediction_error = histogram(
            "dps_prediction_error_seconds",
            "Absolute difference between the predicted and the actual duration of a turn",
            LATENCY_BUCKETS,
            "pool",
        )
        self.estimated_regret = self._plain_counter(
            "dps_estimated_regret_seconds",
            "Seconds by which turns took longer than was predicted for the other pool",
        )
        self.access_log_dropped = self._plain_counter(
            "dps_access_log_dropped", "Entries of the access log that could not be written"
        )
        self.decision_log_dropped = self._plain_counter(
            "dps_decision_log_dropped", "Entries of the decision log that could not be written"
        )

        self.genai_duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "GenAI server request duration",
            LATENCY_BUCKETS,
            *GENAI_LABELS,
        )
        self.genai_first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "GenAI server time to first token",
            LATENCY_BUCKETS,
            *GENAI_LABELS,
        )
        self.genai_token_usage = histogram(
            "gen_ai_client_token_usage",
            "GenAI tokens used, by type",
            TOKEN_BUCKETS,
            *GENAI_LABELS,
            "gen_ai_token_type",
        )

    def _counter(self, name: str, help_text: str, *labels: str) -> Labelled[Counter]:
        return Labelled(Counter(name, help_text, labels, registry=self.registry))

    def _histogram(
        self, name: str, help_text: str, buckets: Sequence[float], *labels: str
    ) -> Labelled[Histogram]:
        return Labelled(Histogram(name, help_text, labels, buckets=buckets, registry=self.registry))

    def _gauge(self, name: str, help_text: str, mode: MultiprocessMode, *labels: str) -> Labelled[Gauge]:
        return Labelled(Gauge(name, help_text, labels, registry=self.registry, multiprocess_mode=mode))

    def _plain_counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, registry=self.registry)

    def _plain_histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help_text, buckets=buckets, registry=self.registry)

    def _plain_gauge(self, name: str, help_text: str, mode: MultiprocessMode) -> Gauge:
        return Gauge(name, help_text, registry=self.registry, multiprocess_mode=mode)

    def render(self) -> bytes:
        """The metrics in Prometheus's text format, aggregated across all workers."""
        directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if directory and Path(directory).is_dir():
            merged = CollectorRegistry()
            multiprocess.MultiProcessCollector(merged)  # type: ignore[no-untyped-call]
            return generate_latest(merged)
        return generate_latest(self.registry)
