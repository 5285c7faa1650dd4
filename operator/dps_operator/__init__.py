"""The control plane: a Kubernetes operator that creates and maintains all child objects of a DPSRouter."""
