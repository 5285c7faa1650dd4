"""Specs that the CRD accepts and the operator refuses, because they cannot work. Running workloads are not changed."""

import pytest

from dps_testkit.cluster.kube import Kube
from e2e.cluster.routers import router, speculation
from e2e.control_plane.objects import ready

pytest_plugins = ["e2e.cluster.fixtures"]

pytestmark = pytest.mark.usefixtures("shared_operator")

ADAPTERS = [{"name": "sql", "path": "org/sql"}]
IMAGE = {"oci": {"image": "registry.example/qwen:1"}}


def test_volume_that_the_cluster_does_not_support_is_refused_by_the_api_server(kube: Kube) -> None:
    """Image volumes are disabled by default before Kubernetes 1.35."""
    kube.apply(router(model={"source": IMAGE}))
    kube.until("qwen", SpecValid="InvalidSpec")
    message = kube.condition("qwen", "SpecValid")["message"]
    assert message.startswith("Deployment qwen-")
    assert message.endswith("; the other objects of the DPSRouter are applied")


def test_adapters_are_accepted_with_a_method_that_supports_them(kube: Kube) -> None:
    model = {"adapters": ADAPTERS, "tokenizer": "org/tokenizer", "revision": "v2"}
    ready(kube, model=model, **speculation(algorithm="Ngram"))
