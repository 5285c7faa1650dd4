"""A pytest plugin that prints the table of fault cases and writes it to the file named by FAULTS_TABLE."""

import os
from pathlib import Path

import pytest

from dps_testkit.traffic.table import Report

REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = Report()


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    """The report to which tests of fault cases add their rows."""
    return pytestconfig.stash[REPORT]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    report = config.stash[REPORT]
    if not report.rows:
        return
    terminalreporter.section("fault cases")
    terminalreporter.write(report.text())
    for row in report.rows:
        for trouble in sorted(set(row.troubles)):
            terminalreporter.write_line(f"{row.case}: {trouble}")
    if path := os.environ.get("FAULTS_TABLE"):
        Path(path).write_text(report.text(), encoding="utf-8")
