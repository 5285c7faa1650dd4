"""A pytest plugin: the table of fault cases, at the end of the run and in the file that FAULTS_TABLE names."""

import os
from pathlib import Path

import pytest

from dps_testkit.traffic.table import Report

REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = Report()


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    """Where a test of a fault case puts its row."""
    return pytestconfig.stash[REPORT]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    told = config.stash[REPORT]
    if not told.rows:
        return
    terminalreporter.section("fault cases")
    terminalreporter.write(told.text())
    for row in told.rows:
        for trouble in sorted(set(row.troubles)):
            terminalreporter.write_line(f"{row.case}: {trouble}")
    if path := os.environ.get("FAULTS_TABLE"):
        Path(path).write_text(told.text(), encoding="utf-8")
