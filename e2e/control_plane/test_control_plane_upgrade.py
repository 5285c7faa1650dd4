"""DPSRouters survive helm upgrade from an older chart, rollback, uninstall and reinstallation."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """An older chart: another version, no `networkPolicy` in the CRD, and an additional permission."""
    chart = tmp_path / "dps-router"
    shutil.copytree(CHART, chart)
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(described | {"version": "0.0.9", "appVersion": "0.0.9"}))
    crd = yaml.safe_load((chart / "files/crd.yaml").read_text())
    del fields(crd)["networkPolicy"]
    (chart / "files/crd.yaml").write_text(yaml.safe_dump(crd))
    roles = (chart / "templates/rbac.yaml").read_text()
    rules = '  {{- include "dps-router.rules" . | nindent 2 }}\n'
    assert rules in roles
    more = '  - {apiGroups: [""], resources: [nodes], verbs: [list]}\n'
    (chart / "templates/rbac.yaml").write_text(roles.replace(rules, rules + more))
    return chart


def fields(crd: Manifest) -> Manifest:
    """The schema of the fields of spec."""
    found: Manifest = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]
    return found


@pytest.fixture
def system(installed: Kube) -> Iterator[Kube]:
    """The operator's namespace. The current release is restored for other tests afterwards."""
    kube = Kube(installed.kubeconfig, SYSTEM)
    yield kube
    kube.helm("upgrade", "--install", RELEASE, str(CHART), *FLAGS)


def has_policies(system: Kube) -> bool:
    return "networkPolicy" in fields(system.get("crd", CRD))


def may_list_nodes(system: Kube) -> bool:
    account = f"system:serviceaccount:{SYSTEM}:{OPERATOR}"
    try:
        return system.kubectl("auth", "can-i", "list", "nodes", "--as", account).strip() == "yes"
    except RefusedError:
        return False


def features(system: Kube) -> tuple[bool, bool]:
    """The two differences between the releases: `networkPolicy` in the CRD, and the permission to list nodes."""
    return has_policies(system), may_list_nodes(system)


def uids(kube: Kube) -> dict[str, str]:
    kinds = "dpsrouter,deployment,statefulset,service,secret,configmap,persistentvolumeclaim"
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["uid"]
        for item in kube.list(kinds)
        if item["metadata"]["name"].startswith(("qwen", "data-qwen"))
    }


@pytest.mark.timeout(900)
def test_routers_survive_upgrade_rollback_uninstall_and_reinstall(
    kube: Kube, system: Kube, older: Path, start_operator: StartOperator
) -> None:
    # Start from the older release, whose operator creates a router.
    system.helm("upgrade", RELEASE, str(older), *FLAGS)
    eventually(lambda: _has_features(system, OLDER))
    operator = start_operator()
    kube.apply(router())
    kube.until("qwen", 120, Ready="True", Progressing="Settled")
    before = uids(kube)
    operator.stop()

    system.helm("upgrade", RELEASE, str(CHART), *FLAGS)
    eventually(lambda: _has_features(system, NEWER))
    operator = start_operator()
    eventually(lambda: kube.apply(router(networkPolicy={})))
    kube.until("qwen", 120, Ready="True", Progressing="Settled")
    assert len(kube.list("networkpolicy")) == 4
    assert uids(kube) == before
    operator.stop()

    # Roll back while the new field is set: the older CRD drops it, and running pods are not touched.
    system.helm("rollback", RELEASE, *FLAGS)
    eventually(lambda: _has_features(system, OLDER))
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

    def observed() -> None:
        assert kube.get("dpsrouter", "qwen")["status"]["routing"]["thresholdTokens"] == 32

    eventually(observed)
    kube.until("qwen", 120, Ready="True", Progressing="Settled")
    assert uids(kube) == before


@pytest.mark.timeout(900)
def test_upgrade_of_the_operator_restarts_engines_only_on_request(
    kube: Kube, start_operator: StartOperator
) -> None:
    cache = {"mode": "Common", "mooncake": {"segmentSize": "1Gi"}}
    shared: dict[str, Any] = {"engine": {"version": "0.5.23"}, "prefixCache": cache}
    operator = start_operator()
    kube.apply(router(**shared))
    kube.until("qwen", 120, Ready="True", Progressing="Settled")
    before = engine_pods(kube)
    operator.stop()

    start_operator("--plugin-image", "operator:next")
    eventually(lambda: _is_outdated(kube))
    kube.apply(router(**shared, routing={"thresholdTokens": 64}))
    kube.until("qwen", 120, Ready="True", Progressing="Settled")
    assert engine_pods(kube) == before

    shared["engine"] = {"version": "0.5.23", "upgradePolicy": "Automatic"}
    kube.apply(router(**shared))
    eventually(lambda: _are_replaced(kube, before))
    kube.until("qwen", 120, Ready="True", Progressing="Settled")
    revisions = kube.get("dpsrouter", "qwen")["status"]["pools"]["greedy"]["revisions"]
    assert len(revisions) == 2


def engine_pods(kube: Kube) -> set[str]:
    found = kube.list("pod", "dpsrouter.io/component in (speculative,greedy)")
    return {item["metadata"]["uid"] for item in found if "deletionTimestamp" not in item["metadata"]}


def _is_outdated(kube: Kube) -> None:
    pools = kube.get("dpsrouter", "qwen")["status"]["pools"]
    assert [pool.get("outdated") for pool in pools.values()] == [True, True]


def _are_replaced(kube: Kube, before: set[str]) -> None:
    assert engine_pods(kube).isdisjoint(before)


def _has_features(system: Kube, expected: tuple[bool, bool]) -> None:
    assert features(system) == expected
