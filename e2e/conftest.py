"""Adds the state of the cluster to the report of a failed test."""

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from dps_testkit.cluster.kube import Kube
from dps_testkit.paths import ROOT
from e2e.cluster.diagnostics import collect

FOLDER = ROOT / "build/e2e"

# Tests of traces use gRPC and start child processes; gRPC's fork handlers occasionally abort such a child (SIGABRT).
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the state of every namespace used by a failed test to its report."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for name, value in item.funcargs.items():
            if isinstance(value, Kube):
                folder = FOLDER / Path(item.nodeid.replace("/", "-").replace("::", "-")) / name
                report.sections.append((f"{value.namespace}, more in {folder}", collect(value, folder)))
    return report
