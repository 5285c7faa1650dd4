"""What needs no GPU: emulated engines, workloads, replay, the local stack, the demo and the benchmarks."""
