"""Workloads, replay, simulation, the demo and the benchmarks. None of them requires a GPU."""
