"""HTTPRoute, ServiceMonitor and PrometheusRule by their real CRDs: there, not there yet, and no longer there."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dps_testkit.cluster.kube import BIN, Kube, Manifest
from dps_testkit.cluster.operator import StartOperator
from dps_testkit.paths import ROOT
from dps_testkit.waiting import eventually
from e2e.cluster.routers import router

pytest_plugins = ["e2e.cluster.fixtures"]

CRDS = BIN / "crds"
ROUTE = {"parentRefs": [{"name": "public", "namespace": "edge"}], "hostnames": ["llm.example.com"]}
WANTED: Manifest = {
    "gateway": {"httpRoute": ROUTE},
    "telemetry": {"serviceMonitor": {"interval": "15s", "labels": {"release": "prometheus"}}},
}


@contextmanager
def crds(kube: Kube) -> Iterator[None]:
    """The CRDs are installed for a while."""
    try:
        kube.kubectl("apply", "--server-side", "--filename", str(CRDS))
        eventually(lambda: _established(kube))
        yield
    finally:
        kube.kubectl("delete", "--filename", str(CRDS), "--ignore-not-found", "--timeout", "60s")


def _established(kube: Kube) -> None:
    # Refused where a CRD has no status at all yet.
    kube.kubectl("wait", "--for=condition=Established", "--filename", str(CRDS), "--timeout", "60s")


@pytest.fixture
def known(kube: Kube) -> Iterator[None]:
    with crds(kube):
        yield


def unknown(kube: Kube) -> None:
    kube.until("qwen", SpecValid="InvalidSpec", SpeculativePoolReady="True", GatewayReady="True")
    message = kube.condition("qwen", "SpecValid")["message"]
    assert "HTTPRoute is unknown to this cluster: install its CRDs, or remove the field" in message
    assert "ServiceMonitor is unknown to this cluster" in message


def parts(kube: Kube) -> list[str]:
    found = kube.list("httproute,servicemonitor", "dpsrouter.io/router=qwen")
    return sorted(f"{one['kind']}/{one['metadata']['name']}" for one in found)


def test_an_operator_older_than_the_crds_takes_them_up_and_outlives_them(
    kube: Kube, start_operator: StartOperator
) -> None:
    operator = start_operator(everywhere=True)
    kube.apply(router(**WANTED))
    unknown(kube)
    with crds(kube):
        kube.until("qwen", 120, Ready="True", Progressing="Settled")
        route, monitor = kube.get("httproute", "qwen-gateway"), kube.get("servicemonitor", "qwen-metrics")
        # It watches them as well: what others change is put back.
        kube.patch("httproute", "qwen-gateway", {"spec": {"hostnames": ["other.example.com"]}})
        kube.patch("servicemonitor", "qwen-metrics", {"metadata": {"labels": {"release": "other"}}})

        def back() -> None:
            assert kube.get("httproute", "qwen-gateway")["spec"] == route["spec"]
            labels = kube.get("servicemonitor", "qwen-metrics")["metadata"]["labels"]
            assert labels == monitor["metadata"]["labels"]

        eventually(back)
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 5}}})
    unknown(kube)
    kube.apply(router())
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert operator.get("/healthz") == "ok"


@pytest.mark.usefixtures("known", "operator")
def test_what_is_asked_for_is_made_as_their_schemas_want_it_and_goes_when_it_is_not(kube: Kube) -> None:
    kube.apply(router(**WANTED))
    kube.until("qwen", Ready="True", Progressing="Settled")
    assert kube.get("httproute", "qwen-gateway")["spec"] == {
        "parentRefs": [
            {
                "group": "gateway.networking.k8s.io",
                "kind": "Gateway",
                "name": "public",
                "namespace": "edge",
            }
        ],
        "hostnames": ["llm.example.com"],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                "backendRefs": [
                    {"group": "", "kind": "Service", "name": "qwen-gateway", "port": 8000, "weight": 1}
                ],
            }
        ],
    }
    monitor = kube.get("servicemonitor", "qwen-metrics")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert [one["interval"] for one in monitor["spec"]["endpoints"]] == ["15s", "15s"]
    assert parts(kube) == ["HTTPRoute/qwen-gateway", "ServiceMonitor/qwen-metrics"]
    kube.apply(router())

    def gone() -> None:
        assert parts(kube) == []

    eventually(gone)


@pytest.mark.usefixtures("known", "operator")
def test_what_their_schemas_refuse_is_told(kube: Kube) -> None:
    kube.apply(router(gateway={"httpRoute": {**ROUTE, "hostnames": ["not a host"]}}))
    kube.until("qwen", SpecValid="InvalidSpec", GatewayReady="True")
    assert "HTTPRoute qwen-gateway: " in kube.condition("qwen", "SpecValid")["message"]
    kube.apply(router(gateway={"httpRoute": ROUTE}))
    kube.until("qwen", Ready="True", Progressing="Settled")


@pytest.mark.usefixtures("known")
def test_the_chart_makes_its_own_where_they_are_switched_on(kube: Kube) -> None:
    chart = str(ROOT / "charts/dps-router")
    common = ("monitored", chart, "--set", "crds.enabled=false", "--wait", "--timeout", "60s")
    switches = [f"monitoring.{name}.enabled" for name in ("serviceMonitor", "prometheusRule", "dashboard")]
    kube.helm("install", *common, *(word for name in switches for word in ("--set", f"{name}=true")))
    kinds, ours = "servicemonitor,prometheusrule,configmap", "app.kubernetes.io/instance=monitored"
    assert sorted(one["kind"] for one in kube.list(kinds, ours)) == [
        "ConfigMap",
        "PrometheusRule",
        "ServiceMonitor",
    ]
    kube.helm("upgrade", *common)
    assert kube.list(kinds, ours) == []
    kube.helm("uninstall", "monitored", "--wait", "--timeout", "60s")
