"""The Prometheus metrics of SGLang that dashboards, alerts and tests read. Durations are emulated seconds."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dps_local.emulated_sglang.scheduler import Scheduler, Sequence, Step, StepKind
from dps_local.emulated_sglang.settings import EngineSettings

STAGE_LATENCY = tuple(0.001 * 1.62**power for power in range(30))
STORAGE_BANDWIDTH = (0.1, 0.5, 1, 5, 10, 50, 100)
KV_BYTES_PER_TOKEN = 57_344
"""Those of Qwen2.5-7B with 16 bits."""
ENGINE_LABELS = {"engine_type": "unified"}
BY_STREAMING = (*ENGINE_LABELS, "is_streaming")
SCHEDULER_LABELS = {**ENGINE_LABELS, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}


class EngineMetrics:
    """One engine's metrics."""

    def __init__(self, settings: EngineSettings) -> None:
        self.registry = CollectorRegistry()
        self._model = settings.served_model_name
        self._capacity = capacity = settings.max_total_tokens
        self._running = self._gauge("num_running_reqs", "The number of running requests.")
        self._queued = self._gauge("num_queue_reqs", "The number of requests in the waiting queue.")
        self._usage = self._gauge("token_usage", "The token usage.")
        self._spec_length = self._gauge("spec_accept_length", "Mean acceptance length, bonus token included.")
        self._gauge("max_total_num_tokens", "Capacity of the KV cache pool in tokens.").set(capacity)
        self._prompt = self._counter(
            "prompt_tokens_total", "Number of prefill tokens processed.", *BY_STREAMING
        )
        self._generated = self._counter(
            "generation_tokens_total", "Number of generation tokens processed.", *BY_STREAMING
        )
        self._verified = self._counter(
            "spec_verify_calls_total", "Number of speculative decoding verification calls.", *ENGINE_LABELS
        )
        self._requests = self._counter("num_requests_total", "Number of requests processed.", *BY_STREAMING)
        self._aborted = self._counter(
            "num_aborted_requests_total", "Number of requests aborted.", *ENGINE_LABELS
        )
        self._cached = self._counter(
            "cached_tokens_total", "Number of cached prompt tokens by source.", *ENGINE_LABELS, "cache_source"
        )
        self._gauge("kv_cache_memory_usage_gb", "The memory of the KV cache in GiB.").set(
            capacity * KV_BYTES_PER_TOKEN / 2**30
        )
        self._realtime = self._counter(
            "realtime_tokens_total", "Total number of tokens processed.", *SCHEDULER_LABELS, "mode"
        )
        self._stages = Histogram(
            "sglang:per_stage_req_latency_seconds",
            "The latency of each stage of requests.",
            ("model_name", *SCHEDULER_LABELS, "stage"),
            buckets=STAGE_LATENCY,
            registry=self.registry,
        )
        if settings.storage is None:
            return
        self._prefetch = Histogram(
            "sglang:prefetch_bandwidth",
            "Histogram of the bandwidth of transfers from the storage in GB/s.",
            ("model_name", *SCHEDULER_LABELS),
            buckets=STORAGE_BANDWIDTH,
            registry=self.registry,
        )
        # The metrics of the plugin dps_sglang.
        self._pages = Counter(
            "dps_prefix_cache_pages",
            "Pages that this engine read from and wrote to the common prefix cache",
            ["outcome"],
            registry=self.registry,
        )
        sharing = Gauge(
            "dps_prefix_cache_sharing",
            "1 for the pages of the common prefix cache that this engine shares, or the reason why it shares none",
            ["pages", "problem"],
            registry=self.registry,
        )
        sharing.labels(settings.storage.folder.name, "").set(1)

    def step_done(self, step: Step, scheduler: Scheduler) -> None:
        """Record a forward pass."""
        if step.kind is StepKind.PREFILL:
            labels = {"model_name": self._model, **SCHEDULER_LABELS}
            self._realtime.labels(**labels, mode="prefill_compute").inc(step.uncached_tokens)
            for _ in step.sequences:
                self._stages.labels(**labels, stage="prefill_forward").observe(step.seconds)
        self.observe_load(scheduler)

    def count_pages(self, outcome: str, pages: int) -> None:
        """Count pages of the common prefix cache."""
        self._pages.labels(outcome).inc(pages)

    def fetched(self, tokens: int, seconds: float) -> None:
        """Record a transfer from the storage."""
        bandwidth = tokens * KV_BYTES_PER_TOKEN / seconds / 1e9
        self._prefetch.labels(model_name=self._model, **SCHEDULER_LABELS).observe(bandwidth)

    def observe_load(self, scheduler: Scheduler) -> None:
        """Set the gauges from the scheduler's state."""
        self._running.set(scheduler.running)
        self._queued.set(len(scheduler.waiting))
        self._usage.set(scheduler.used_tokens / self._capacity)

    def finished(self, sequence: Sequence, streaming: bool, aborted: bool) -> None:
        """Record a sequence that finished or was aborted."""
        engine = {"model_name": self._model, **ENGINE_LABELS}
        labels = {**engine, "is_streaming": str(streaming).lower()}
        self._requests.labels(**labels).inc()
        self._prompt.labels(**labels).inc(len(sequence.prompt))
        self._generated.labels(**labels).inc(sequence.generated)
        stored = sequence.storage_tokens
        self._cached.labels(**engine, cache_source="device").inc(sequence.cached_tokens - stored)
        if stored:
            self._cached.labels(**engine, cache_source="storage").inc(stored)
        if aborted:
            self._aborted.labels(**engine).inc()
        if sequence.verify_steps:
            self._verified.labels(**engine).inc(sequence.verify_steps)
            self._spec_length.set(1 + sequence.accepted_drafts / sequence.verify_steps)

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format, without `_created` samples, as from SGLang."""
        lines = generate_latest(self.registry).splitlines(keepends=True)
        return b"".join(line for line in lines if b"_created" not in line)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        gauge = Gauge(f"sglang:{name}", help_text, ("model_name", *SCHEDULER_LABELS), registry=self.registry)
        return gauge.labels(model_name=self._model, **SCHEDULER_LABELS)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"sglang:{name}", help_text, ("model_name", *labels), registry=self.registry)
