"""The audit of the dependencies, against reports in the format of pip-audit."""

import json
from typing import Any

import pytest

from dps_tools.audit import AuditSkipped, Found, Result, failures, ignored, result_of

VULNERABILITY = {"id": "PYSEC-1", "fix_versions": ["2.0"], "aliases": ["CVE-1"], "description": "It is slow."}
FOUND = Found("b", "1.0", "PYSEC-1", frozenset({"CVE-1"}), ("2.0",))


def report(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages, "fixes": []})


def test_report_is_read() -> None:
    assert result_of(
        report(
            {"name": "a", "version": "1.0", "vulns": []},
            {"name": "b", "version": "1.0", "vulns": [VULNERABILITY]},
            {"name": "c", "skip_reason": "not found"},
        )
    ) == Result(checked=2, skipped=("c",), found=(FOUND,))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ERROR: no network", "pip-audit has written no report"),
        (
            report({"name": "c", "skip_reason": "not found"}),
            "the registry has no data about vulnerabilities of these versions",
        ),
    ],
    ids=["no report", "no data"],
)
def test_audit_without_data_is_skipped(text: str, reason: str) -> None:
    with pytest.raises(AuditSkipped) as skipped:
        result_of(text)
    assert str(skipped.value) == reason


@pytest.mark.parametrize(
    ("result", "reasons", "lines"),
    [
        (Result(2, (), ()), {}, []),
        (Result(2, (), (FOUND,)), {}, ["b 1.0: PYSEC-1 (fixed in 2.0)"]),
        (
            Result(2, (), (Found("b", "1.0", "PYSEC-1", frozenset(), ()),)),
            {},
            ["b 1.0: PYSEC-1 (no version fixes it)"],
        ),
        (Result(2, (), (FOUND,)), {"PYSEC-1": "It is not used."}, []),
        (Result(2, (), (FOUND,)), {"CVE-1": "It is not used."}, []),
        (Result(2, (), ()), {"CVE-1": "It is not used."}, ["pyproject.toml: CVE-1 is ignored but not found"]),
        (Result(2, ("b",), ()), {"CVE-1": "It is not used."}, []),
    ],
    ids=["none", "found", "not fixed", "ignored", "ignored by alias", "ignored for nothing", "not checked"],
)
def test_vulnerabilities_fail_unless_they_are_ignored(
    result: Result, reasons: dict[str, str], lines: list[str]
) -> None:
    assert failures(result, reasons) == lines


def test_ignored_vulnerability_needs_a_reason() -> None:
    assert ignored({"tool": {}}) == {}
    with pytest.raises(ValueError, match=r"tool\.dps-audit\.ignored\.CVE-1 has no reason"):
        ignored({"tool": {"dps-audit": {"ignored": {"CVE-1": " "}}}})
