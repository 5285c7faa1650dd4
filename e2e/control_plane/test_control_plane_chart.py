"""The chart with real helm, and the generated manifests, on a real API server."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps_testkit.cluster.kube import BIN, Kube, Manifest
from dps_testkit.errors import RefusedError
from dps_testkit.paths import ROOT
from dps_testkit.waiting import eventually
from dps_tools.release import install_manifest
from e2e.control_plane.chart_values import DIGEST, EVERY_VALUE

pytest_plugins = ["e2e.cluster.fixtures"]

CHART = str(ROOT / "charts/dps-router")
EXAMPLES = sorted((ROOT / "manifests/examples").glob("*.yaml"))


@pytest.fixture
def values(tmp_path: Path) -> Path:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(EVERY_VALUE))
    return path


def rendered(kube: Kube, *arguments: str) -> dict[tuple[str, str], Manifest]:
    text = kube.helm("template", "dps", CHART, *arguments)
    found = [item for item in yaml.safe_load_all(text) if item]
    return {(item["kind"], item["metadata"]["name"]): item for item in found}


def test_values_file_with_every_value_is_rendered(bare_cluster: Kube, values: Path) -> None:
    assert set(EVERY_VALUE) == set(yaml.safe_load((ROOT / "charts/dps-router/values.yaml").read_text()))
    bare_cluster.helm("lint", CHART, "--strict", "--values", str(values))
    objects = rendered(bare_cluster, "--values", str(values))
    pod = objects["Deployment", "dps-dps-router-1"]["spec"]["template"]
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "router"
    assert pod["metadata"]["labels"]["team"] == "serving"
    assert pod["spec"]["containers"][0]["image"] == f"mirror:5000/reg/operator@{DIGEST}"
    for each in (pod, objects["Pod", "dps-dps-router-1-test"]):
        assert each["spec"]["imagePullSecrets"] == [{"name": "pull"}, {"name": "shared"}]
        assert each["spec"]["nodeSelector"] == EVERY_VALUE["nodeSelector"]
        assert each["spec"]["tolerations"] == EVERY_VALUE["tolerations"]
        assert each["spec"]["containers"][0]["imagePullPolicy"] == "Always"
    assert pod["spec"]["serviceAccountName"] == "robot"
    text = yaml.safe_dump(pod)
    for expected in (
        "mirror:5000/reg/gateway@sha256:1111",
        "mirror:5000/reg/valkey:8",
        "mirror:5000/reg/lab@sha256:2222",
        "HTTPS_PROXY",
        "/ca",
        "--verbose",
        "priorityClassName",
        "topologySpreadConstraints",
    ):
        assert expected in text
    assert {kind for kind, _ in objects} >= {
        "ServiceMonitor",
        "PodMonitor",
        "PrometheusRule",
        "ConfigMap",
        "Secret",
    }
    assert "annotations" not in objects["CustomResourceDefinition", "dpsrouters.dpsrouter.io"]["metadata"]


def test_each_value_changes_the_rendered_manifests(bare_cluster: Kube, tmp_path: Path) -> None:
    values = EVERY_VALUE | {
        "watchNamespaces": ["a"],
        "rbac": {"aggregate": False},
        "serviceAccount": {"name": "robot"},
    }
    plain = rendered(bare_cluster)
    without_effect = []
    for name, value in values.items():
        (tmp_path / "values.yaml").write_text(yaml.safe_dump({name: value}))
        if rendered(bare_cluster, "--values", str(tmp_path / "values.yaml")) == plain:
            without_effect.append(name)
    assert without_effect == []


@pytest.mark.parametrize(
    "argument",
    [
        "workers=0",
        "image.pullPolicy=Sometimes",
        "imagePullSecret=x",
        "imagePullSecrets={pull}",
        "monitoring.grafana=true",
        "nameOverride=Not_A_Name",
        "fullnameOverride=not.a.name",
        "watchNamespaces={Not_A_Name}",
        r"commonLabels.app\.kubernetes\.io/part-of=x",
        r"podLabels.app\.kubernetes\.io/component=x",
    ],
)
def test_invalid_value_is_rejected(bare_cluster: Kube, argument: str) -> None:
    with pytest.raises(RefusedError, match="values don't meet the specifications of the schema"):
        bare_cluster.helm("template", "dps", CHART, "--set", argument)


def test_every_container_has_requests_and_a_memory_limit(bare_cluster: Kube) -> None:
    objects = rendered(bare_cluster).items()
    pods = [
        *(item["spec"]["template"] for (kind, _), item in objects if kind == "Deployment"),
        *(item for (kind, _), item in objects if kind == "Pod"),
    ]
    assert len(pods) == 2, "the operator's, and that of `helm test`"
    for container in (each for pod in pods for each in pod["spec"]["containers"]):
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


def test_watching_named_namespaces_needs_no_cluster_role(bare_cluster: Kube) -> None:
    objects = rendered(bare_cluster, "--set", "watchNamespaces={a,b}", "--set", "rbac.aggregate=false")
    assert not [kind for kind, _ in objects if kind.startswith("ClusterRole")]
    operator = objects["Deployment", "dps-dps-router"]["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "DPS_OPERATOR_NAMESPACES", "value": "a,b"} in operator["env"]


def packaged(kube: Kube, folder: Path) -> str:
    """The path of the chart as `make release` packages it."""
    kube.helm("package", CHART, "--destination", str(folder))
    (package,) = folder.glob("dps-router-*.tgz")
    return str(package)


@pytest.mark.parametrize("registry", ["mirror:5000", "mirror:5000/"])
def test_packaged_chart_pulls_every_image_from_the_given_registry(
    bare_cluster: Kube, tmp_path: Path, registry: str
) -> None:
    package = packaged(bare_cluster, tmp_path)
    text = bare_cluster.helm("template", "dps", package, "--set", f"global.imageRegistry={registry}")
    images = set(re.findall(r"[\w:./-]*(?:dps-router/\w+|redis|rclone):[\w.-]+", text))
    tag = yaml.safe_load(Path(CHART, "Chart.yaml").read_text())["appVersion"]
    assert images == {
        *(f"mirror:5000/dps-router/{name}:{tag}" for name in ("operator", "gateway", "lab")),
        "mirror:5000/redis:7.4-alpine",
        "mirror:5000/rclone/rclone:1.75.1",
    }


def test_install_manifest_passes_a_dry_run(installed: Kube, tmp_path: Path) -> None:
    (tmp_path / "install.yaml").write_text(install_manifest(BIN / "helm"))
    flags = ("--server-side", "--dry-run=server", "--force-conflicts")
    for manifest in (tmp_path / "install.yaml", ROOT / "manifests/crd.yaml"):
        installed.run("kubectl", "apply", *flags, "--filename", str(manifest))


def test_several_operator_pods_are_evicted_one_after_the_other(bare_cluster: Kube) -> None:
    budget = ("PodDisruptionBudget", "dps-dps-router")
    assert budget not in rendered(bare_cluster)
    spec = rendered(bare_cluster, "--set", "replicas=2")[budget]["spec"]
    assert (spec["maxUnavailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")


SECRETS = {
    "production": {
        "hugging-face": "token=hf_x",
        "llama-api-keys": "keys=team-a:secret",
        "redis": "url=rediss://:secret@redis.example.com:6380/0",
        "llm-example-com": "tls.crt=x",
    }
}
"""Secrets that the examples refer to: content by name."""
WITHOUT_CLOUD = [example for example in EXAMPLES if example.stem not in ("gke", "eks", "aks")]
"""Examples that test_control_plane_clouds.py does not apply; there is one set of volumes for each cloud's example."""


@pytest.mark.usefixtures("shared_operator")
@pytest.mark.parametrize("example", WITHOUT_CLOUD, ids=[example.stem for example in WITHOUT_CLOUD])
def test_example_becomes_ready(kube: Kube, example: Path) -> None:
    for name, content in SECRETS.get(example.stem, {}).items():
        kube.kubectl("create", "secret", "generic", name, "--from-literal", content)
    kube.kubectl("apply", "-f", str(example))
    for item in yaml.safe_load_all(example.read_text()):
        if item["kind"] == "DPSRouter":
            kube.until(item["metadata"]["name"], 180, Ready="True", Progressing="Settled")


@pytest.fixture
def second_namespace(bare_cluster: Kube, installed: Kube) -> Iterator[Kube]:
    """A namespace for a second release, which must not install the CRD again."""
    with bare_cluster.scratch() as scratch:
        yield scratch


def test_packaged_chart_is_installed_upgraded_rolled_back_and_uninstalled(
    second_namespace: Kube, tmp_path: Path
) -> None:
    package = packaged(second_namespace, tmp_path)
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    second_namespace.kubectl("label", "namespace", second_namespace.namespace, restricted)
    wait = ("--wait", "--timeout", "60s")
    common = (package, "--set", "crds.enabled=false", "--set", "global.imageRegistry=mirror:5000", *wait)
    second_namespace.helm("install", "second", *common)
    assert operator_container(second_namespace)["image"].startswith("mirror:5000/dps-router/operator:")
    second_namespace.helm("upgrade", "second", *common, "--set", "workers=3")
    assert operator_env(second_namespace)["DPS_OPERATOR_WORKERS"] == "3"
    second_namespace.helm("rollback", "second", "1", *wait)
    assert operator_env(second_namespace)["DPS_OPERATOR_WORKERS"] == "8"
    second_namespace.helm("uninstall", "second", "--wait", "--timeout", "60s")
    eventually(lambda: _gone(second_namespace))


def operator_container(kube: Kube) -> Manifest:
    """The operator's container."""
    (container,) = kube.get("deployment", "second-dps-router")["spec"]["template"]["spec"]["containers"]
    found: Manifest = container
    return found


def operator_env(kube: Kube) -> dict[str, Any]:
    return {item["name"]: item.get("value") for item in operator_container(kube)["env"]}


def _gone(kube: Kube) -> None:
    assert kube.list("deployment,service,serviceaccount", "app.kubernetes.io/instance=second") == []


def test_operator_has_required_permissions_only_and_notes_are_printed(installed: Kube) -> None:
    system = Kube(installed.kubeconfig, "dps-system")
    assert "kubectl get dps --watch" in system.helm("get", "notes", "dps")
    operator = "system:serviceaccount:dps-system:dps-dps-router"
    for verb, what, expected in (
        ("patch", "deployments.apps", "yes"),
        ("get", "secrets/dps-router-credentials", "yes"),
        ("get", "secrets", "no"),
        ("get", "secrets/hugging-face", "no"),
        ("create", "secrets", "no"),
        ("delete", "pods", "no"),
        ("patch", "pods", "no"),
        ("create", "clusterroles", "no"),
        ("patch", "dpsrouters", "no"),
        ("patch", "nodes", "no"),
        ("list", "customresourcedefinitions", "yes"),
        ("patch", "customresourcedefinitions", "no"),
    ):
        assert may(installed, operator, verb, what) == expected, (verb, what)


def may(kube: Kube, account: str, verb: str, what: str) -> str:
    try:
        return kube.kubectl("auth", "can-i", verb, what, "--as", account).strip()
    except RefusedError:
        return "no"
