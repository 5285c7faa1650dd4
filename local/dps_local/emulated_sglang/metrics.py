"""Prometheus metrics with SGLang's names. Durations are emulated seconds."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dps_local.emulated_sglang.scheduler import Scheduler, Sequence, Step, StepKind

# The buckets of SGLang 0.5.23's observability/metrics_collector.py.
TIME_TO_FIRST_TOKEN = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
E2E_LATENCY = (*TIME_TO_FIRST_TOKEN, 600, 1200, 1800, 2400)
INTER_TOKEN_LATENCY = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080),
    *(0.100, 0.200, 0.400, 0.600, 0.800, 1.0, 2.0, 4.0, 6.0, 8.0),
)
STAGE_LATENCY = tuple(0.001 * 1.62**power for power in range(30))
STORAGE_BANDWIDTH = (0.1, 0.5, 1, 5, 10, 50, 100)
KV_BYTES_PER_TOKEN = 57_344
"""Those of Qwen2.5-7B with 16 bits."""
ENGINE_LABELS = {"engine_type": "unified"}
SCHEDULER_LABELS = {**ENGINE_LABELS, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}


class EngineMetrics:
    """One engine's metrics. The public attributes are also reported by other endpoints."""

    def __init__(self, model_name: str, capacity: int, shared_pages: str | None = None) -> None:
        self.registry = CollectorRegistry()
        self.gen_throughput = 0.0
        self.cache_hit_rate = 0.0
        self.accept_length = 0.0
        self.accept_rate = 0.0
        self.uncached_tokens = 0
        self.prefill_seconds = 0.0
        self._model = model_name
        self._capacity = capacity
        self._running = self._gauge("num_running_reqs", "The number of running requests.")
        self._queued = self._gauge("num_queue_reqs", "The number of requests in the waiting queue.")
        self._used = self._gauge("num_used_tokens", "The number of used tokens.")
        self._usage = self._gauge("token_usage", "The token usage.")
        self._throughput = self._gauge("gen_throughput", "The generation throughput (token/s).")
        self._hit_rate = self._gauge("cache_hit_rate", "The prefix cache hit rate.")
        self._spec_length = self._gauge("spec_accept_length", "Mean acceptance length, bonus token included.")
        self._spec_rate = self._gauge("spec_accept_rate", "Accepted drafts over proposed drafts.")
        self._gauge("max_total_num_tokens", "Capacity of the KV cache pool in tokens.").set(capacity)
        self._prompt = self._counter("prompt_tokens_total", "Number of prefill tokens processed.", True)
        self._generated = self._counter(
            "generation_tokens_total", "Number of generation tokens processed.", True
        )
        self._verified = self._counter(
            "spec_verify_calls_total", "Number of speculative decoding verification calls.", False
        )
        self._requests = self._counter("num_requests_total", "Number of requests processed.", True)
        self._aborted = self._counter("num_aborted_requests_total", "Number of requests aborted.", False)
        self._cached = Counter(
            "sglang:cached_tokens_total",
            "Number of cached prompt tokens by source.",
            ("model_name", *ENGINE_LABELS, "cache_source"),
            registry=self.registry,
        )
        self._gauge("kv_cache_memory_usage_gb", "The memory of the KV cache in GiB.").set(
            capacity * KV_BYTES_PER_TOKEN / 2**30
        )
        self._realtime = Counter(
            "sglang:realtime_tokens_total",
            "Total number of tokens processed.",
            ("model_name", *SCHEDULER_LABELS, "mode"),
            registry=self.registry,
        )
        self._stages = Histogram(
            "sglang:per_stage_req_latency_seconds",
            "The latency of each stage of requests.",
            ("model_name", *SCHEDULER_LABELS, "stage"),
            buckets=STAGE_LATENCY,
            registry=self.registry,
        )
        if shared_pages is not None:
            self._shares(shared_pages)
        self._prefetch: Histogram | None = None
        self._pages: Counter | None = None
        self._ttft = self._histogram("time_to_first_token_seconds", TIME_TO_FIRST_TOKEN, True)
        self._e2e = self._histogram("e2e_request_latency_seconds", E2E_LATENCY, True)
        self._inter_token = self._histogram("inter_token_latency_seconds", INTER_TOKEN_LATENCY, False)

    def step_done(self, step: Step, tokens: int, scheduler: Scheduler) -> None:
        """Record a forward pass that generated `tokens` tokens."""
        if step.kind is StepKind.PREFILL:
            prompt = sum(len(sequence.prompt) for sequence in step.sequences)
            self.uncached_tokens += step.uncached_tokens
            self.prefill_seconds += step.seconds
            labels = {"model_name": self._model, **SCHEDULER_LABELS}
            self._realtime.labels(**labels, mode="prefill_compute").inc(step.uncached_tokens)
            for _ in step.sequences:
                self._stages.labels(**labels, stage="prefill_forward").observe(step.seconds)
            self.cache_hit_rate = 1 - step.uncached_tokens / prompt if prompt else 0.0
        elif step.seconds:
            self.gen_throughput = tokens / step.seconds
        self.observe_load(scheduler)

    def _shares(self, pages: str) -> None:
        """Export the metric of the plugin dps_sglang."""
        gauge = Gauge(
            "dps_prefix_cache_sharing",
            "1 for the pages of the common prefix cache that this engine uses, and the problem that it has with them",
            ["pages", "problem"],
            registry=self.registry,
        )
        gauge.labels(pages, "").set(1)

    def count_pages(self, outcome: str, pages: int) -> None:
        """Count pages of the common prefix cache in the metric of the plugin dps_sglang."""
        if self._pages is None:
            self._pages = Counter(
                "dps_prefix_cache_pages",
                "Pages that this engine read from and wrote to the common prefix cache",
                ["outcome"],
                registry=self.registry,
            )
        self._pages.labels(outcome).inc(pages)

    def fetched(self, tokens: int, seconds: float) -> None:
        """Record a transfer from the storage. As in SGLang, engines without storage do not export its metrics."""
        if self._prefetch is None:
            self._prefetch = Histogram(
                "sglang:prefetch_bandwidth",
                "Histogram of the bandwidth of transfers from the storage in GB/s.",
                ("model_name", *SCHEDULER_LABELS),
                buckets=STORAGE_BANDWIDTH,
                registry=self.registry,
            )
        bandwidth = tokens * KV_BYTES_PER_TOKEN / seconds / 1e9
        self._prefetch.labels(model_name=self._model, **SCHEDULER_LABELS).observe(bandwidth)

    def observe_load(self, scheduler: Scheduler) -> None:
        """Set the gauges from the scheduler's state."""
        self._running.set(scheduler.running)
        self._queued.set(len(scheduler.waiting))
        self._used.set(scheduler.used_tokens)
        self._usage.set(scheduler.used_tokens / self._capacity)
        self._throughput.set(self.gen_throughput if scheduler.running else 0.0)
        self._hit_rate.set(self.cache_hit_rate)
        self._spec_length.set(self.accept_length)
        self._spec_rate.set(self.accept_rate)

    def finished(self, sequence: Sequence, streaming: bool, aborted: bool, draft_tokens: int) -> None:
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
        if sequence.first_token is not None and sequence.finished is not None:
            self._ttft.labels(**labels).observe(sequence.first_token - sequence.arrived)
            self._e2e.labels(**labels).observe(sequence.finished - sequence.arrived)
            if sequence.generated > 1:
                decode = sequence.finished - sequence.first_token
                self._inter_token.labels(**engine).observe(decode / (sequence.generated - 1))
        if sequence.verify_steps:
            self._verified.labels(**engine).inc(sequence.verify_steps)
            self.accept_length = 1 + sequence.accepted_drafts / sequence.verify_steps
            self.accept_rate = sequence.accepted_drafts / (sequence.verify_steps * max(1, draft_tokens - 1))

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format, without `_created` samples, as from SGLang."""
        lines = generate_latest(self.registry).splitlines(keepends=True)
        return b"".join(line for line in lines if b"_created" not in line)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        gauge = Gauge(f"sglang:{name}", help_text, ("model_name", *SCHEDULER_LABELS), registry=self.registry)
        return gauge.labels(model_name=self._model, **SCHEDULER_LABELS)

    def _counter(self, name: str, help_text: str, by_streaming: bool) -> Counter:
        return Counter(f"sglang:{name}", help_text, self._labels(by_streaming), registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...], by_streaming: bool) -> Histogram:
        return Histogram(
            f"sglang:{name}",
            f"Histogram of {name}.",
            self._labels(by_streaming),
            buckets=buckets,
            registry=self.registry,
        )

    def _labels(self, by_streaming: bool) -> tuple[str, ...]:
        return ("model_name", *ENGINE_LABELS, *(("is_streaming",) if by_streaming else ()))
