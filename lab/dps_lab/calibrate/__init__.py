"""Calibration: the search for the policy, the threshold and the split of the GPUs that suit a workload."""
