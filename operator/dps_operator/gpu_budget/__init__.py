"""Moves replicas between the pools of a DPSRouter with `spec.gpuBudget`, by the demand of each pool."""
