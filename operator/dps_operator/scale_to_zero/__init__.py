"""Stops the engines of idle pools with `autoscaling.minReplicas: 0`, and starts them when requests arrive."""
