"""Kubernetes clusters for tests: kubectl and helm, a control plane, an operator process."""
