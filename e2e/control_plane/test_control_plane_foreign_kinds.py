"""HTTPRoute and the kinds of the Prometheus operator: their CRDs are present, installed later, or removed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from dps_testkit.cluster.kube import BIN, Kube, Manifest
from dps_testkit.cluster.operator import StartOperator
from dps_testkit.paths import ROOT
from dps_testkit.waiting import eventually
from e2e.cluster.routers import router
from e2e.control_plane.chart_values import EVERY_VALUE

pytest_plugins = ["e2e.cluster.fixtures"]

CRDS = BIN / "crds"
CHART = str(ROOT / "charts/dps-router")
ROUTE: Manifest = {"parentRefs": [{"name": "public", "namespace": "edge"}], "hostnames": ["llm.example.com"]}
MONITORING = ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")
OPTIONS: Manifest = {
    "gateway": {"httpRoute": ROUTE},
    "telemetry": {"serviceMonitor": {"interval": "15s", "labels": {"release": "prometheus"}}},
}


@contextmanager
def crds(kube: Kube) -> Iterator[None]:
    """Install the CRDs, and remove them when the block exits."""
    try:
        kube.kubectl("apply", "--server-side", "--filename", str(CRDS))
        eventually(lambda: _established(kube))
        yield
    finally:
        # The API server of a busy machine may need more than a minute to delete CRDs.
        eventually(lambda: _delete(kube), seconds=300)


def _established(kube: Kube) -> None:
    # kubectl fails as long as a CRD has no status.
    kube.kubectl("wait", "--for=condition=Established", "--filename", str(CRDS), "--timeout", "60s")


def _delete(kube: Kube) -> None:
    kube.kubectl("delete", "--filename", str(CRDS), "--ignore-not-found", "--timeout", "60s")


@pytest.fixture
def known(kube: Kube) -> Iterator[None]:
    with crds(kube):
        yield


def unknown(kube: Kube) -> None:
    kube.until("qwen", SpecValid="InvalidSpec", SpeculativePoolReady="True", GatewayReady="True")
    message = kube.condition("qwen", "SpecValid")["message"]
    assert "HTTPRoute is not installed in this cluster: install its CRD, or remove the field" in message
    assert "ServiceMonitor is not installed in this cluster" in kube.condition("qwen", "Monitored")["message"]


def parts(kube: Kube) -> list[str]:
    found = kube.list("httproute,servicemonitor", "dpsrouter.io/router=qwen")
    return sorted(f"{item['kind']}/{item['metadata']['name']}" for item in found)


def test_crds_may_be_installed_and_removed_while_an_operator_runs(
    kube: Kube, start_operator: StartOperator
) -> None:
    operator = start_operator("--resync-seconds", "20", everywhere=True)
    kube.apply(router(**OPTIONS))
    unknown(kube)
    with crds(kube):
        kube.until("qwen", 120, Ready="True", Progressing="Settled")
        route, monitor = kube.get("httproute", "qwen-gateway"), kube.get("servicemonitor", "qwen-metrics")
        # Drift is reverted by a watch, or by the listing: Kopf does not watch a kind that the API server's discovery
        # does not contain yet when Kopf notices its CRD.
        kube.patch("httproute", "qwen-gateway", {"spec": {"hostnames": ["other.example.com"]}})
        kube.patch("servicemonitor", "qwen-metrics", {"metadata": {"labels": {"release": "other"}}})

        def reverted() -> None:
            assert kube.get("httproute", "qwen-gateway")["spec"] == route["spec"]
            labels = kube.get("servicemonitor", "qwen-metrics")["metadata"]["labels"]
            assert labels == monitor["metadata"]["labels"]

        eventually(reverted)
    # Kopf ends the process if it reconnects a watch of a kind that has been removed; the kubelet restarts it.
    operator.stop()
    operator = start_operator(everywhere=True)
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 5}}})
    unknown(kube)
    kube.apply(router())
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert operator.get("/healthz") == "ok"


@pytest.mark.usefixtures("known", "operator")
def test_route_has_the_filters_and_weights_of_the_spec(kube: Kube) -> None:
    headers = {"type": "RequestHeaderModifier", "requestHeaderModifier": {"remove": ["x-debug"]}}
    other = {"name": "other-gateway", "namespace": "next", "port": 80, "weight": 10}
    route = {
        **ROUTE,
        "filters": [headers],
        "weight": 90,
        "backendRefs": [other],
        "requestTimeout": "10m",
    }
    kube.apply(router(gateway={"httpRoute": route}))
    kube.until("qwen", Ready="True", Progressing="Settled")
    (rule,) = kube.get("httproute", "qwen-gateway")["spec"]["rules"]
    service = {"group": "", "kind": "Service"}
    assert kube.get("dpsrouter", "qwen")["status"]["url"] == "http://llm.example.com"
    assert rule["timeouts"] == {"request": "10m"}
    assert rule["filters"] == [headers]
    assert rule["backendRefs"] == [
        {**service, "name": "qwen-gateway", "port": 8000, "weight": 90},
        {**service, **other},
    ]


@pytest.mark.usefixtures("known", "operator")
def test_objects_match_their_schemas_and_are_deleted_when_their_spec_fields_are_removed(kube: Kube) -> None:
    kube.apply(router(**OPTIONS))
    kube.until("qwen", Ready="True", Progressing="Settled")
    monitor = kube.get("servicemonitor", "qwen-metrics")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert [item["interval"] for item in monitor["spec"]["endpoints"]] == ["15s", "15s"]
    assert parts(kube) == ["HTTPRoute/qwen-gateway", "ServiceMonitor/qwen-metrics"]
    kube.apply(router())

    def gone() -> None:
        assert parts(kube) == []

    eventually(gone)


@pytest.mark.usefixtures("known", "operator")
def test_object_rejected_by_its_schema_is_reported(kube: Kube) -> None:
    kube.apply(router(gateway={"httpRoute": {**ROUTE, "hostnames": ["not a host"]}}))
    kube.until("qwen", SpecValid="InvalidSpec", GatewayReady="True")
    assert "HTTPRoute qwen-gateway: " in kube.condition("qwen", "SpecValid")["message"]
    kube.apply(router(gateway={"httpRoute": ROUTE}))
    kube.until("qwen", Ready="True", Progressing="Settled")


@pytest.mark.usefixtures("known")
def test_chart_creates_monitoring_objects_only_if_enabled(kube: Kube) -> None:
    common = ("monitored", CHART, "--set", "crds.enabled=false", "--wait", "--timeout", "60s")
    switches = [f"monitoring.{name}.enabled" for name in MONITORING]
    kube.helm("install", *common, *(word for name in switches for word in ("--set", f"{name}=true")))
    kinds = "servicemonitor,podmonitor,prometheusrule,configmap"
    release = "app.kubernetes.io/instance=monitored"
    assert sorted(item["kind"] for item in kube.list(kinds, release)) == [
        "ConfigMap",
        "PodMonitor",
        "PrometheusRule",
        "ServiceMonitor",
    ]
    kube.helm("upgrade", *common)
    assert kube.list(kinds, release) == []
    kube.helm("uninstall", "monitored", "--wait", "--timeout", "60s")


@pytest.mark.usefixtures("known")
def test_objects_of_the_chart_with_every_value_pass_a_dry_run(kube: Kube, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(EVERY_VALUE))
    text = kube.helm("template", "dps", CHART, "--values", str(tmp_path / "values.yaml"))
    # The API server refuses a pod, such as that of `helm test`, whose service account does not exist.
    kube.kubectl("create", "serviceaccount", EVERY_VALUE["serviceAccount"]["name"])
    flags = ("--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict")
    accepted = kube.kubectl("apply", *flags, "--filename", "-", "--output", "name", stdin=text)
    assert len(accepted.split()) == len([item for item in yaml.safe_load_all(text) if item])
