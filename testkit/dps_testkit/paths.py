"""Folders of the repository that tests refer to."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CLUSTER_SCRIPTS = ROOT / "e2e/cluster"
"""Scripts and manifests that build, start and stop a Kubernetes cluster."""
