"""helm upgrade from an older chart, rollback, uninstall and install again, under DPSRouters that live through it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import StartOperator
from dps_testkit.errors import RefusedError
from dps_testkit.paths import ROOT
from dps_testkit.waiting import eventually
from e2e.cluster.routers import router

pytest_plugins = ["e2e.cluster.fixtures"]

SYSTEM, RELEASE, OPERATOR = "dps-system", "dps", "dps-dps-router"
CHART = ROOT / "charts/dps-router"
CRD = "dpsrouters.dpsrouter.io"
OLDER, NEWER = (False, True), (True, False)
FLAGS = ("--wait", "--timeout", "100s")


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The chart as it may have been: another version, no `networkPolicy` in the CRD, a right no longer needed."""
    chart = tmp_path / "dps-router"
    shutil.copytree(CHART, chart)
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(described | {"version": "0.0.9", "appVersion": "0.0.9"}))
    crd = yaml.safe_load((chart / "files/crd.yaml").read_text())
    del fields(crd)["networkPolicy"]
    (chart / "files/crd.yaml").write_text(yaml.safe_dump(crd))
    roles = (chart / "templates/rbac.yaml").read_text()
    rules = 'rules: {{- include "dps-router.rules" . | nindent 2 }}\n'
    assert rules in roles
    more = "  - {apiGroups: [apiextensions.k8s.io], resources: [customresourcedefinitions], verbs: [list]}\n"
    (chart / "templates/rbac.yaml").write_text(roles.replace(rules, rules + more))
    return chart


def fields(crd: Manifest) -> Manifest:
    """The fields of spec."""
    found: Manifest = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]
    return found


@pytest.fixture
def system(installed: Kube) -> Iterator[Kube]:
    """The operator's namespace; the release is as other tests expect it afterwards."""
    kube = Kube(installed.kubeconfig, SYSTEM)
    yield kube
    kube.helm("upgrade", "--install", RELEASE, str(CHART), *FLAGS)


def has_policies(system: Kube) -> bool:
    return "networkPolicy" in fields(system.get("crd", CRD))


def may_list_crds(system: Kube) -> bool:
    account = f"system:serviceaccount:{SYSTEM}:{OPERATOR}"
    try:
        return system.kubectl("auth", "can-i", "list", "crd", "--as", account).strip() == "yes"
    except RefusedError:
        return False


def versions(system: Kube) -> tuple[bool, bool]:
    """What tells the newer release from the older: the CRD's field, and the right."""
    return has_policies(system), may_list_crds(system)


def uids(kube: Kube) -> dict[str, str]:
    kinds = "dpsrouter,deployment,statefulset,service,secret,configmap,persistentvolumeclaim"
    return {
        f"{one['kind']}/{one['metadata']['name']}": one["metadata"]["uid"]
        for one in kube.list(kinds)
        if one["metadata"]["name"].startswith(("qwen", "data-qwen"))
    }


@pytest.mark.timeout(400)
def test_routers_live_through_upgrade_rollback_uninstall_and_install(
    kube: Kube, system: Kube, older: Path, start_operator: StartOperator
) -> None:
    # The release is taken back to the older version; an operator of the time makes a router.
    system.helm("upgrade", RELEASE, str(older), *FLAGS)
    eventually(lambda: _is(system, OLDER))
    operator = start_operator()
    kube.apply(router())
    kube.until("qwen", 120, Ready="True", Progressing="Settled")
    before = uids(kube)
    operator.stop()

    system.helm("upgrade", RELEASE, str(CHART), *FLAGS)
    eventually(lambda: _is(system, NEWER))
    operator = start_operator()
    eventually(lambda: kube.apply(router(networkPolicy={})))
    kube.until("qwen", 120, Ready="True", Progressing="Settled")
    assert len(kube.list("networkpolicy")) == 4
    assert uids(kube) == before
    operator.stop()

    # Back again with the new field set: the old CRD does not know it, and nothing that runs is touched.
    system.helm("rollback", RELEASE, *FLAGS)
    eventually(lambda: _is(system, OLDER))
    operator = start_operator()
    kube.apply(router(routing={"thresholdTokens": 64}))
    kube.until("qwen", 120, Ready="True")
    assert uids(kube) == before
    operator.stop()

    system.helm("uninstall", RELEASE, *FLAGS)
    assert system.get("crd", CRD)["metadata"]["name"] == CRD
    assert uids(kube) == before
    system.helm("install", RELEASE, str(CHART), *FLAGS)
    start_operator()
    kube.patch("dpsrouter", "qwen", {"spec": {"routing": {"thresholdTokens": 32}}})

    def told() -> None:
        assert kube.get("dpsrouter", "qwen")["status"]["routing"]["thresholdTokens"] == 32

    eventually(told)
    kube.until("qwen", 120, Ready="True", Progressing="Settled")
    assert uids(kube) == before


def _is(system: Kube, wanted: tuple[bool, bool]) -> None:
    assert versions(system) == wanted


def test_helm_test_asks_the_operator_by_its_service(system: Kube) -> None:
    """kwok's pods run for ever, so that the pod of `helm test` is looked at while it waits for its end."""
    with pytest.raises(RefusedError, match="timed out"):
        system.helm("test", RELEASE, "--timeout", "5s")
    pod = system.get("pod", f"{OPERATOR}-test")["spec"]["containers"][0]
    operator = system.get("deployment", OPERATOR)["spec"]["template"]["spec"]["containers"][0]
    port = system.get("service", OPERATOR)["spec"]["ports"][0]["port"]
    assert f"http://{OPERATOR}:{port}{operator['readinessProbe']['httpGet']['path']}" in pod["args"][0]
    assert pod["image"] == operator["image"]
    slices = system.list("endpointslice", f"kubernetes.io/service-name={OPERATOR}")
    assert [len(one["endpoints"]) for one in slices] == [1]
    system.kubectl("delete", "pod", f"{OPERATOR}-test", "--wait=false")
