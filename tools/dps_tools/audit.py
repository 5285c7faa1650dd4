"""Checks the locked dependencies for known vulnerabilities, with pip-audit. Run by `make audit`.

python -m dps_tools.audit

Exits with 1 if a vulnerability is found that `[tool.dps-audit.ignored]` in `pyproject.toml` does not list, or if a
listed one is not found any more. What cannot be checked, because the registry fails or has no data, is reported as
skipped.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
LOCK: Final = "requirements.lock"
TOOL: Final = "pip-audit>=2.10,<3"
SECONDS: Final = 300
"""Longest time for the audit, including the installation of the tool."""


class AuditSkipped(Exception):
    """Nothing could be checked; the message says why."""


@dataclass(frozen=True)
class Found:
    """A known vulnerability of a locked package."""

    package: str
    version: str
    id: str
    aliases: frozenset[str]
    fixed_in: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """All identifiers of the vulnerability."""
        return self.aliases | {self.id}

    def __str__(self) -> str:
        fixed = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no version fixes it"
        return f"{self.package} {self.version}: {self.id} ({fixed})"


@dataclass(frozen=True)
class Result:
    """The result of an audit."""

    checked: int
    skipped: tuple[str, ...]
    """The packages for which the registry had no data."""
    found: tuple[Found, ...]


def ignored(project: Mapping[str, Any]) -> dict[str, str]:
    """The reason for each vulnerability that is ignored, from the parsed `pyproject.toml`.

    Raises ValueError if one has no reason.
    """
    entries: dict[str, str] = project["tool"].get("dps-audit", {}).get("ignored", {})
    for name, reason in entries.items():
        if not reason.strip():
            raise ValueError(f"pyproject.toml: tool.dps-audit.ignored.{name} has no reason")
    return entries


def result_of(report: str) -> Result:
    """Parse pip-audit's report in JSON. Raises AuditSkipped if it is not one, or if no package could be checked."""
    try:
        packages = json.loads(report)["dependencies"]
    except ValueError:
        raise AuditSkipped("pip-audit has written no report") from None
    checked = [each for each in packages if "vulns" in each]
    if not checked:
        raise AuditSkipped("the registry has no data about vulnerabilities of these versions")
    return Result(
        checked=len(checked),
        skipped=tuple(each["name"] for each in packages if "vulns" not in each),
        found=tuple(
            Found(
                each["name"],
                each["version"],
                vuln["id"],
                frozenset(vuln["aliases"]),
                tuple(vuln["fix_versions"]),
            )
            for each in checked
            for vuln in each["vulns"]
        ),
    )


def failures(result: Result, reasons: Mapping[str, str]) -> list[str]:
    """The lines that describe why the audit fails; empty if it does not."""
    lines = [str(found) for found in result.found if not found.names & reasons.keys()]
    named = frozenset[str]().union(*(found.names for found in result.found))
    # A package without data may have the vulnerability still.
    if not result.skipped:
        lines += [f"pyproject.toml: {name} is ignored but not found" for name in reasons if name not in named]
    return lines


def run_tool(lock: Path) -> str:
    """pip-audit's report in JSON. Raises AuditSkipped if it does not end in time or reports an error instead."""
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv), "tool", "run", TOOL, "--requirement", str(lock), "--no-deps", "--disable-pip"]
    options = ["--vulnerability-service", "pypi", "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(
            [*command, *options], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise AuditSkipped(f"pip-audit did not end within {SECONDS} s") from None
    if not done.stdout.strip():
        raise AuditSkipped((done.stderr.strip().splitlines() or ["pip-audit failed"])[-1])
    return done.stdout


def main() -> int:
    """Audit the lock file and print the result. Returns the exit status."""
    reasons = ignored(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    try:
        result = result_of(run_tool(ROOT / LOCK))
    except AuditSkipped as reason:
        print(f"audit skipped: {reason}")
        return 0
    for line in (problems := failures(result, reasons)):
        print(line)
    print(
        f"{result.checked} packages checked, {len(result.skipped)} skipped {' '.join(result.skipped)}".rstrip()
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
