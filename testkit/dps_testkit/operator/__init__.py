"""Helpers for tests of the operator: DPSRouters, Kubernetes objects, a fake API server, golden files."""
