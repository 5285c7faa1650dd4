"""Specs that the CRD accepts and the operator refuses, because they cannot work. Running workloads are not changed."""

import pytest

from dps_testkit.cluster.kube import Kube, Manifest
from e2e.cluster.routers import router, speculation
from e2e.control_plane.objects import children, deployment, ready

pytest_plugins = ["e2e.cluster.fixtures"]
pytestmark = pytest.mark.usefixtures("shared_operator")

ADAPTERS = [{"name": "sql", "path": "org/sql"}]
DISK = {"size": "10Gi", "accessMode": "ReadWriteOnce"}
IMAGE = {"oci": {"image": "registry.example/qwen:1"}}

REFUSED: dict[str, tuple[Manifest, str]] = {
    "a model that does not fit": (
        {"model": {"name": "meta-llama/Llama-3.1-70B-Instruct"}},
        "spec.engine.tensorParallel: 131.4 GiB (meta-llama/Llama-3.1-70B-Instruct)",
    ),
    "heads that cannot be divided": (
        {"engine": {"tensorParallel": 8}},
        "spec.engine.tensorParallel: the 28 attention heads and 4 KV heads of Qwen/Qwen2.5-7B-Instruct cannot be "
        "divided among 8 GPUs; choose one of 1, 2, 4",
    ),
    "an argument that the operator sets": (
        {"engine": {"args": ["--port=1"]}},
        "spec.engine.args: --port is set by the operator; remove it",
    ),
    "an API key in the arguments": (
        {"engine": {"args": ["--api-key=x"]}},
        "spec.engine.args: --api-key is not supported: ",
    ),
    "a tokenizer in the arguments": (
        {"pools": {"greedy": {"args": ["--tokenizer-path", "org/other"]}}},
        "spec.pools.greedy.args: --tokenizer-path is set by spec.model.tokenizer; remove it",
    ),
    "a URL without a tokenizer": (
        {"model": {"name": "s3://bucket/qwen"}},
        "spec.model.tokenizer: the gateway cannot load a tokenizer from s3://bucket/qwen; ",
    ),
    "adapters with a draft model": (
        {"model": {"adapters": ADAPTERS}},
        "spec.pools.speculative.speculation.algorithm: SGLang 0.5.23 supports no LoRA adapters with Standalone; ",
    ),
    "a path on a disk that the gateway does not have": (
        {"model": {"name": "/models/qwen", "cache": DISK}},
        "spec.model.tokenizer: /models/qwen is on a volume that each engine pod creates for itself, ",
    ),
}


def test_refused_spec_is_reported_and_workloads_keep_running(kube: Kube) -> None:
    ready(kube)
    before = (
        children(kube),
        [deployment(kube, pool)["metadata"]["generation"] for pool in ("speculative", "greedy")],
    )
    for change, words in REFUSED.values():
        kube.apply(router(**change))
        kube.until("qwen", SpecValid="InvalidSpec", Ready="InvalidSpec")
        message = kube.condition("qwen", "SpecValid")["message"]
        assert message.startswith(words)
        assert message.endswith("; running workloads are not changed")
    after = (
        children(kube),
        [deployment(kube, pool)["metadata"]["generation"] for pool in ("speculative", "greedy")],
    )
    assert after == before
    ready(kube)


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
