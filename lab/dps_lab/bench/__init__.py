"""Benchmarks: the latency, throughput and CPU time of the gateway, beside those of vllm-router and LiteLLM."""
