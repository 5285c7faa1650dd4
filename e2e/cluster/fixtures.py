"""Fixtures for tests on a real API server: one control plane per run, one namespace per test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dps_testkit.cluster.control_plane import control_plane
from dps_testkit.cluster.kube import Kube
from dps_testkit.cluster.operator import Operator, StartOperator, service_account_kubeconfig
from dps_testkit.paths import ROOT
from dps_testkit.waiting import eventually

PORT = 20000 + os.getpid() % 2000 * 5
"""The first of five ports, chosen so that concurrent runs are unlikely to collide."""
SYSTEM = "dps-system"
RELEASE = "dps"
ACCOUNT = "dps-dps-router"


@pytest.fixture(scope="session")
def bare_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """The cluster with its nodes and volumes only."""
    with control_plane(tmp_path_factory.mktemp("control-plane"), PORT) as kube:
        yield kube


@pytest.fixture(scope="session")
def installed(bare_cluster: Kube) -> Kube:
    """The cluster with the chart installed. kwok only simulates its operator pod; tests start real operators."""
    system = Kube(bare_cluster.kubeconfig, SYSTEM)
    chart = str(ROOT / "charts/dps-router")
    system.helm("upgrade", "--install", RELEASE, chart, "--create-namespace", "--wait", "--timeout", "60s")
    # kubectl fails as long as the CRD has no status.
    eventually(lambda: system.kubectl("wait", "--for=condition=Established", "crd/dpsrouters.dpsrouter.io"))
    return bare_cluster


@pytest.fixture
def kube(installed: Kube) -> Iterator[Kube]:
    """A temporary namespace for the test."""
    with installed.scratch() as scratch:
        yield scratch


@pytest.fixture
def start_operator(kube: Kube, tmp_path: Path) -> Iterator[StartOperator]:
    """Starts operators with the permissions of the chart's ServiceAccount, for the test's namespace or for all."""
    started: list[Operator] = []

    def start(*arguments: str, server: str = "", everywhere: bool = False) -> Operator:
        system = Kube(kube.kubeconfig, SYSTEM)
        kubeconfig = service_account_kubeconfig(
            system, ACCOUNT, tmp_path / f"operator-{len(started)}.yaml", server
        )
        log = tmp_path / f"operator-{len(started)}.log"
        scope = [] if everywhere else ["--namespace", kube.namespace]
        operator = Operator(kubeconfig, log, *scope, *arguments)
        started.append(operator)
        return operator

    yield start
    for number, operator in enumerate(started):
        operator.stop()
        print((tmp_path / f"operator-{number}.log").read_text()[-4000:])


@pytest.fixture
def operator(start_operator: StartOperator) -> Operator:
    """A running operator."""
    return start_operator()
