"""The gateway's Prometheus metrics: the project's own, and the GenAI semantic conventions' beside them."""

import os
from pathlib import Path
from typing import Final, Generic, TypeVar

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

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

disable_created_metrics()  # type: ignore[no-untyped-call]

TOKEN_BUCKETS: Final = (
    0,
    16,
    32,
    64,
    128,
    256,
    384,
    512,
    768,
    1024,
    1536,
    2048,
    4096,
    8192,
    16384,
    32768,
    131072,
)
"""Table 3's thresholds, and on to long contexts."""
OVERHEAD_BUCKETS: Final = (0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.5, 2.0)
LATENCY_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PER_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)


M = TypeVar("M", Counter, Gauge, Histogram)


class Labelled(Generic[M]):
    """A metric's children by label values: looked up without the library's checks and lock."""

    def __init__(self, metric: M) -> None:
        self._metric: M = metric
        self._children: dict[tuple[str, ...], M] = {}

    def labels(self, *values: str) -> M:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*values)
        return child


class Metrics:
    """One registry a process. With several workers the files under PROMETHEUS_MULTIPROC_DIR join them."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.decisions = Labelled(
            Counter(
                "dps_route_decisions",
                "Turns routed, by pool and reason",
                ["pool", "reason"],
                registry=registry,
            )
        )
        self.history = Labelled(
            Counter(
                "dps_history",
                "Turns by how their prompt relates to the session's history",
                ["kind"],
                registry=registry,
            )
        )
        self.delta_tokens = Histogram(
            "dps_delta_tokens", "Prompt growth since the session's last turn (ΔL)",
            buckets=TOKEN_BUCKETS, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Histogram(
            "dps_prompt_tokens", "Prompt length (L)", buckets=TOKEN_BUCKETS, registry=registry
        )
        self.overhead = Histogram(
            "dps_gateway_overhead_seconds", "Time the gateway adds before the upstream request is sent",
            buckets=OVERHEAD_BUCKETS, registry=registry,
        )  # fmt: skip
        self.queue_time = Labelled(Histogram(
            "dps_queue_seconds", "Time a request waited for a place in its pool", ["pool"],
            buckets=LATENCY_BUCKETS, registry=registry,
        ))  # fmt: skip
        self.time_to_first_token = Labelled(Histogram(
            "dps_time_to_first_token_seconds", "From the request's arrival to the first byte of its answer", ["pool"],
            buckets=LATENCY_BUCKETS, registry=registry,
        ))  # fmt: skip
        self.time_per_output_token = Labelled(Histogram(
            "dps_time_per_output_token_seconds", "Time per output token after the first, of streamed answers", ["pool"],
            buckets=PER_TOKEN_BUCKETS, registry=registry,
        ))  # fmt: skip
        self.cached_tokens = Labelled(
            Counter(
                "dps_cached_tokens",
                "Prompt tokens that the engine found in its KV cache",
                ["pool"],
                registry=registry,
            )
        )
        self.in_flight = Labelled(
            Gauge(
                "dps_in_flight",
                "Requests being answered",
                ["pool"],
                registry=registry,
                multiprocess_mode="livesum",
            )
        )
        self.queued = Labelled(
            Gauge(
                "dps_queued",
                "Requests waiting for a place",
                ["pool"],
                registry=registry,
                multiprocess_mode="livesum",
            )
        )
        self.ready_replicas = Labelled(
            Gauge(
                "dps_ready_replicas",
                "Replicas that take requests",
                ["pool"],
                registry=registry,
                multiprocess_mode="livemin",
            )
        )
        self.requests = Labelled(
            Counter(
                "dps_requests",
                "Requests answered, by route and status",
                ["route", "status"],
                registry=registry,
            )
        )
        self.upstream_failures = Labelled(
            Counter(
                "dps_upstream_failures", "Upstream attempts that failed", ["pool", "kind"], registry=registry
            )
        )
        self.state_degraded = Gauge(
            "dps_state_degraded", "1 while session state is not being kept in Redis",
            registry=registry, multiprocess_mode="livemax",
        )  # fmt: skip
        self.state_errors = Labelled(
            Counter("dps_state_errors", "Redis calls that failed", ["kind"], registry=registry)
        )
        self.token_count_mismatch = Counter(
            "dps_token_count_mismatch",
            "Turns whose L differs from the engine's prompt_tokens",
            registry=registry,
        )
        self.config_reloads = Labelled(
            Counter(
                "dps_config_reloads",
                "Changes of the configuration file, by outcome",
                ["outcome"],
                registry=registry,
            )
        )
        self.config_valid = Gauge(
            "dps_config_valid", "0 while the configuration file on disk is one that was refused",
            registry=registry, multiprocess_mode="livemin",
        )  # fmt: skip
        genai = ["gen_ai_operation_name", "gen_ai_request_model"]
        self.genai_duration = Labelled(Histogram(
            "gen_ai_server_request_duration_seconds", "GenAI server request duration", genai,
            buckets=LATENCY_BUCKETS, registry=registry,
        ))  # fmt: skip
        self.genai_first_token = Labelled(Histogram(
            "gen_ai_server_time_to_first_token_seconds", "GenAI time to first token", genai,
            buckets=LATENCY_BUCKETS, registry=registry,
        ))  # fmt: skip
        self.genai_token_usage = Labelled(Histogram(
            "gen_ai_client_token_usage", "GenAI tokens used", [*genai, "gen_ai_token_type"],
            buckets=TOKEN_BUCKETS, registry=registry,
        ))  # fmt: skip
        self.config_valid.set(1)

    def render(self) -> bytes:
        """The exposition text, of all workers where there are several."""
        directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        if directory and Path(directory).is_dir():
            joined = CollectorRegistry()
            multiprocess.MultiProcessCollector(joined)  # type: ignore[no-untyped-call]
            return generate_latest(joined)
        return generate_latest(self.registry)
