"""The audit of the dependencies, against reports in the format of pip-audit."""

import json
from typing import Any

import pytest

from dps_tools.audit import AuditSkipped, Found, Result, failures, ignored, locked, result_of, with_newest

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


def test_audit_without_a_report_is_skipped() -> None:
    with pytest.raises(AuditSkipped, match="pip-audit has written no report"):
        result_of("ERROR: no network")


def test_lock_file_has_the_versions_of_this_machine() -> None:
    lock = "a==1.0\nb==1.0 ; python_version < '3'\nb==2.0 ; python_version >= '3'\nc==1.0 ; sys_platform == 'none'\n"
    assert locked(lock) == {"a": "1.0", "b": "2.0"}


def described(version: str, *vulnerabilities: dict[str, Any]) -> dict[str, Any]:
    """The registry's description of a package."""
    return {"info": {"version": version}, "vulnerabilities": vulnerabilities}


def test_packages_without_data_are_checked_if_the_newest_version_is_locked() -> None:
    known = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fixed_in": ["2.0"], "withdrawn": None}
    withdrawn = known | {"id": "PYSEC-2", "withdrawn": "2026-01-01T00:00:00Z"}
    documents = {
        "b": described("1.0", known, withdrawn),
        "newest": described("1.0"),
        "older": described("1.1"),
    }
    versions = dict.fromkeys(("a", "b", "newest", "older", "unknown"), "1.0")
    result = Result(checked=1, skipped=("b", "newest", "older", "unknown"), found=())
    assert with_newest(result, versions, documents) == Result(3, ("older", "unknown"), (FOUND,))


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
