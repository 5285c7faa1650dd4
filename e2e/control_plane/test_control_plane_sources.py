"""Models from buckets, the engines' caches, and missing Secrets, on a real API server."""

import pytest

from dps_testkit.cluster.kube import Kube, Manifest
from e2e.cluster.routers import router, speculation

pytest_plugins = ["e2e.cluster.fixtures"]

pytestmark = pytest.mark.usefixtures("shared_operator")

BUCKET = {"s3": {"uri": "s3://models/qwen", "credentialsSecretRef": {"name": "bucket"}}}


def template(kube: Kube, component: str) -> Manifest:
    spec: Manifest = kube.get("deployment", f"qwen-{component}")["spec"]["template"]["spec"]
    return spec


def test_router_with_models_in_buckets_becomes_ready_and_is_not_rolled_out_again(kube: Kube) -> None:
    draft = {"gs": {"uri": "gs://models/draft"}}
    kube.apply(
        router(
            model={"source": BUCKET},
            engine={"cache": {"claim": {"size": "1Gi"}}},
            **speculation(algorithm="Eagle", draftModel="d", draftSource=draft),
        )
    )
    kube.until("qwen", SpecValid="Accepted", Ready="True", Progressing="Settled")
    engine = template(kube, "speculative")
    assert [volume["name"] for volume in engine["volumes"]] == ["models", "shm", "engine-cache"]
    assert [container["name"] for container in engine["initContainers"]] == ["model-source", "draft-source"]
    versions = {item["metadata"]["name"]: item["metadata"]["generation"] for item in kube.list("deployment")}
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 256}}})
    kube.until("qwen", SpecValid="Accepted", Progressing="Settled")
    assert versions == {
        item["metadata"]["name"]: item["metadata"]["generation"] for item in kube.list("deployment")
    }
