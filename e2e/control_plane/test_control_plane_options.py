"""Options of the spec on a real API server, which validates the objects that they lead to."""

import pytest

from dps_engines.launch import WITHOUT_DRAFT_MODEL
from dps_operator.build.pods import overlay
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.operator.fragments import fragments
from e2e.cluster.routers import router
from e2e.control_plane.objects import deployment, ready

pytest_plugins = ["e2e.cluster.fixtures"]


def template(kube: Kube, component: str) -> Manifest:
    """The pod of a component's Deployment."""
    found: Manifest = deployment(kube, component)["spec"]["template"]["spec"]
    return found


def test_every_fragment_of_the_documents_is_accepted_by_the_crd(kube: Kube) -> None:
    for fragment in fragments().values():
        manifest = router()
        manifest["spec"] = overlay(manifest["spec"], fragment)
        speculation = manifest["spec"]["pools"]["speculative"]["speculation"]
        if speculation["algorithm"] in WITHOUT_DRAFT_MODEL:
            del speculation["draftModel"]
        kube.apply(manifest, dry_run=True)


@pytest.mark.usefixtures("operator")
def test_pod_template_replaces_members_of_unions(kube: Kube) -> None:
    variable = {"name": "HF_HOME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    engine = {"name": "engine", "readinessProbe": {"exec": {"command": ["true"]}}, "env": [variable]}
    models = {"name": "models", "hostPath": {"path": "/mnt/models"}}
    ready(kube, pools={"greedy": {"podTemplate": {"spec": {"containers": [engine], "volumes": [models]}}}})
    pod = template(kube, "greedy")
    (live,) = pod["containers"]
    assert "httpGet" not in live["readinessProbe"]
    assert next(one for one in live["env"] if one["name"] == "HF_HOME").keys() == {"name", "valueFrom"}
    assert next(one for one in pod["volumes"] if one["name"] == "models").keys() == {"name", "hostPath"}


@pytest.mark.usefixtures("operator")
def test_pools_with_different_engines_and_a_model_on_a_volume_become_ready(kube: Kube) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    kube.apply(claim)
    model = {"source": {"pvc": {"claimName": "models", "path": "qwen"}}, "tokenizer": "org/tokenizer"}
    ready(kube, model=model, pools={"greedy": {"runtime": "VLLM"}})
    ports = {
        pool: kube.get("service", f"qwen-{pool}")["spec"]["ports"][0]["port"]
        for pool in ("speculative", "greedy")
    }
    assert ports == {"speculative": 30000, "greedy": 8000}
    assert template(kube, "greedy")["containers"][0]["image"].startswith("vllm/vllm-openai:")
    for pool in ports:
        (volume,) = [one for one in template(kube, pool)["volumes"] if "persistentVolumeClaim" in one]
        assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
