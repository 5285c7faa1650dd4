"""Benchmarks: the latency, throughput, memory and tracing costs of the gateway, compared with other routers."""
