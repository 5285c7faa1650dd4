"""Models in volumes, buckets and images: paths, mounts and downloads of the engines and the gateway."""

import copy
from typing import Any

import pytest

from dps_gateway.config import GatewayConfig
from dps_operator.build.gateway import gateway_config
from dps_operator.build.launch import engine_arguments
from dps_operator.errors import SpecError
from dps_operator.objects import Manifest
from dps_testkit.operator.routers import SMALLEST, SOURCES, SOURCES_VLLM, router
from tests.operator.harness import OperatorHarness
from tests.operator.objects import engine_pod, gateway_pod

STANDALONE = SMALLEST["pools"]["speculative"]["speculation"]


def spec_of(source: dict[str, Any], draft: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    """The minimal DPSRouter with a source of the model, and one of the draft."""
    speculation = {**STANDALONE, **({"draftSource": draft} if draft else {})}
    return {
        "model": {**SMALLEST["model"], "source": source, **model},
        "pools": {"speculative": {"speculation": speculation}},
    }


PATHS: dict[str, tuple[dict[str, Any], str, str]] = {
    "volume": (
        {"pvc": {"claimName": "weights", "path": "qwen/7b/"}},
        "/mnt/model/qwen/7b",
        "/mnt/model/qwen/7b",
    ),
    "root of a volume": ({"pvc": {"claimName": "weights"}}, "/mnt/model", "/mnt/model"),
    "image": ({"oci": {"image": "i"}}, "/mnt/model", "/mnt/model"),
    "S3": (
        {"s3": {"uri": "s3://bucket/qwen/7b/"}},
        "/models/s3/bucket/qwen/7b",
        "/var/cache/dps/s3/bucket/qwen/7b",
    ),
    "Google Cloud Storage": ({"gs": {"uri": "gs://bucket"}}, "/models/gs/bucket", "/var/cache/dps/gs/bucket"),
}


@pytest.mark.parametrize(("source", "engine", "gateway"), PATHS.values(), ids=PATHS.keys())
def test_engines_and_gateway_read_the_source(source: dict[str, Any], engine: str, gateway: str) -> None:
    made = router(spec_of(source))
    line = engine_arguments(made, "greedy")
    assert line[:4] == ["--model-path", engine, "--served-model-name", "Qwen/Qwen2.5-7B-Instruct"]
    assert "--tokenizer-path" not in line
    config = gateway_config(made)
    assert config["model"] == {"name": "Qwen/Qwen2.5-7B-Instruct", "tokenizer": gateway}
    GatewayConfig.model_validate(config)


def test_gateway_with_a_tokenizer_of_its_own_does_not_read_the_source() -> None:
    spec = spec_of({"oci": {"image": "i"}}, tokenizer="org/tokenizer")
    assert gateway_config(router(spec))["model"]["tokenizer"] == "org/tokenizer"
    line = engine_arguments(router(spec), "greedy")
    assert line[line.index("--tokenizer-path") + 1] == "org/tokenizer"
    assert gateway_pod(spec)["volumes"] == gateway_pod(SMALLEST)["volumes"]


def test_only_the_speculative_pool_reads_the_draft() -> None:
    spec = spec_of({"pvc": {"claimName": "weights"}}, {"pvc": {"claimName": "drafts", "path": "1b"}})
    line = engine_arguments(router(spec), "speculative")
    assert line[line.index("--speculative-draft-model-path") + 1] == "/mnt/draft/1b"
    names = {
        pool: [volume["name"] for volume in engine_pod(spec, pool)["volumes"]]
        for pool in ("speculative", "greedy")
    }
    assert names == {
        "speculative": ["models", "shm", "model-source", "draft-source"],
        "greedy": ["models", "shm", "model-source"],
    }


def test_path_of_the_draft_is_part_of_vllms_configuration() -> None:
    line = engine_arguments(router(SOURCES_VLLM), "speculative")
    assert line[line.index("--model") + 1] == "/mnt/model/llama/8b"
    assert '"model": "/models/gs/models/small"' in line[line.index("--speculative-config") + 1]


ACCOUNTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str | None]] = {
    "of the model": ({"s3": {"uri": "s3://bucket/m", "serviceAccountName": "reader"}}, None, "reader"),
    "of the draft": (
        {"oci": {"image": "i"}},
        {"gs": {"uri": "gs://bucket/m", "serviceAccountName": "r"}},
        "r",
    ),
    "none": ({"s3": {"uri": "s3://bucket/m"}}, None, None),
}


@pytest.mark.parametrize(("source", "draft", "wanted"), ACCOUNTS.values(), ids=ACCOUNTS.keys())
def test_engines_have_the_service_account_of_the_source(
    source: dict[str, Any], draft: dict[str, Any] | None, wanted: str | None
) -> None:
    pod = engine_pod(spec_of(source, draft), "speculative")
    assert pod.get("serviceAccountName") == wanted
    assert pod["automountServiceAccountToken"] is False


def test_different_service_accounts_are_refused() -> None:
    spec = spec_of(
        {"s3": {"uri": "s3://bucket/m", "serviceAccountName": "a"}},
        {"s3": {"uri": "s3://bucket/d", "serviceAccountName": "b"}},
    )
    with pytest.raises(SpecError, match="a pod has one ServiceAccount"):
        engine_pod(spec, "speculative")


def test_gateway_downloads_only_the_tokenizer() -> None:
    (download,) = gateway_pod(SOURCES)["initContainers"]
    assert "--include=/*.{json,jinja,model,tiktoken,txt}" in download["args"]
    assert download["volumeMounts"] == [{"name": "cache", "mountPath": "/var/cache/dps"}]


def without_image_volumes(manifest: Manifest) -> Manifest:
    """The object as an API server stores it whose feature gate ImageVolume is disabled."""
    live = copy.deepcopy(manifest)
    if live["kind"] == "Deployment":
        pod = live["spec"]["template"]["spec"]
        pod["volumes"] = [volume for volume in pod["volumes"] if "image" not in volume]
    return live


async def test_cluster_without_image_volumes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = OperatorHarness(spec_of({"oci": {"image": "registry.example.com/qwen:1"}}))
    store = harness.cluster.store
    monkeypatch.setattr(
        harness.cluster, "store", lambda manifest, *rest: store(without_image_volumes(manifest), *rest)
    )
    await harness.reconcile()
    condition = harness.condition("SpecValid")
    assert (condition["status"], condition["reason"]) == ("False", "InvalidSpec")
    assert (
        "this cluster does not support image volumes, which a source with oci requires"
        in condition["message"]
    )


CACHES: dict[str, tuple[dict[str, Any], Manifest]] = {
    "directory of the node": (
        {"hostPath": "/var/cache/engines"},
        {"hostPath": {"path": "/var/cache/engines", "type": "DirectoryOrCreate"}},
    ),
    "existing claim": ({"existingClaim": "c"}, {"persistentVolumeClaim": {"claimName": "c"}}),
    "own claim": (
        {"claim": {"size": "10Gi"}},
        {"persistentVolumeClaim": {"claimName": "qwen-engine-cache"}},
    ),
    "directory of the pod": ({"emptyDir": {"sizeLimit": "10Gi"}}, {"emptyDir": {"sizeLimit": "10Gi"}}),
}


@pytest.mark.parametrize(("cache", "wanted"), CACHES.values(), ids=CACHES.keys())
def test_engines_compile_into_the_cache_volume(cache: dict[str, Any], wanted: Manifest) -> None:
    pod = engine_pod({**SMALLEST, "engine": {"cache": cache}})
    assert pod["volumes"][-1] == {"name": "engine-cache", **wanted}
    (engine,) = pod["containers"]
    assert engine["volumeMounts"][-1] == {"name": "engine-cache", "mountPath": "/engine-cache"}
    env = {variable["name"]: variable["value"] for variable in engine["env"]}
    assert env["TRITON_CACHE_DIR"] == "/engine-cache/triton"


def test_variables_of_the_spec_override_those_of_the_cache() -> None:
    own = [{"name": "TRITON_CACHE_DIR", "value": "/elsewhere"}]
    pod = engine_pod({**SMALLEST, "engine": {"cache": {"emptyDir": {}}, "env": own}})
    (variable,) = [one for one in pod["containers"][0]["env"] if one["name"] == "TRITON_CACHE_DIR"]
    assert variable["value"] == "/elsewhere"
