"""Fixtures for tests on a real API server: one control plane per run, one namespace per test."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def _operators(kube: Kube, folder: Path) -> Iterator[StartOperator]:
    """Starts operators with the permissions of the chart's ServiceAccount, and stops them."""
    started: list[Operator] = []

    def start(*arguments: str, server: str = "", everywhere: bool = False) -> Operator:
        system = Kube(kube.kubeconfig, SYSTEM)
        kubeconfig = service_account_kubeconfig(
            system, ACCOUNT, folder / f"operator-{len(started)}.yaml", server
        )
        scope = [] if everywhere else ["--namespace", kube.namespace]
        operator = Operator(kubeconfig, folder / f"operator-{len(started)}.log", *scope, *arguments)
        started.append(operator)
        return operator

    yield start
    for operator in started:
        operator.stop()


@pytest.fixture
def start_operator(kube: Kube, tmp_path: Path) -> Iterator[StartOperator]:
    """Starts operators with the permissions of the chart's ServiceAccount, for the test's namespace or for all."""
    with _operators(kube, tmp_path) as start:
        yield start
    for log in sorted(tmp_path.glob("operator-*.log")):
        _print_end(log)


@pytest.fixture
def operator(start_operator: StartOperator) -> Operator:
    """A running operator for the test's namespace."""
    operator = start_operator()
    operator.wait_ready()
    return operator


@pytest.fixture(scope="module")
def _operator_of_module(installed: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    with _operators(installed, tmp_path_factory.mktemp("operator")) as start:
        operator = start(everywhere=True)
        operator.wait_ready()
        yield operator


@pytest.fixture
def shared_operator(_operator_of_module: Operator) -> Iterator[Operator]:
    """A running operator for all namespaces, which the tests of a module share, because its start takes seconds.

    A module whose tests use it must not start other operators.
    """
    yield _operator_of_module
    _print_end(_operator_of_module.log)


def _print_end(log: Path) -> None:
    print(log.read_text()[-4000:])
