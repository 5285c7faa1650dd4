"""Checks the locked dependencies for known vulnerabilities, with pip-audit. Run by `make audit`.

python -m dps_tools.audit

Exits with 1 if a vulnerability is found that `[tool.dps-audit.ignored]` in `pyproject.toml` does not list, or if a
listed one is not found any more. Some mirrors of PyPI describe the newest version of a package only: packages about
which pip-audit finds no data are checked with that description if the lock file has this version. Other packages are
reported as not checked.
"""

import json
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).parents[2]
LOCK: Final = "requirements.lock"
TOOL: Final = "pip-audit>=2.10,<3"
SECONDS: Final = 300
"""Longest time for pip-audit, including its installation."""
REGISTRY: Final = "https://pypi.org/pypi"
REQUEST_SECONDS: Final = 20.0


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
    """The packages about which there is no data."""
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
    """Parse pip-audit's report in JSON. Raises AuditSkipped if it is not one."""
    try:
        packages = json.loads(report)["dependencies"]
    except ValueError:
        raise AuditSkipped("pip-audit has written no report") from None
    checked = [each for each in packages if "vulns" in each]
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


def locked(lock: str) -> dict[str, str]:
    """The version of each package of a lock file that is installed on this machine."""
    requirements = [Requirement(line) for line in lock.splitlines()]
    return {
        each.name: next(iter(each.specifier)).version
        for each in requirements
        if each.marker is None or each.marker.evaluate()
    }


def with_newest(
    result: Result, versions: Mapping[str, str], documents: Mapping[str, Mapping[str, Any]]
) -> Result:
    """The result with the skipped packages that are locked at their newest version.

    versions: the locked ones. documents: the registry's descriptions of the newest versions. Both are by package.
    """
    current = [
        name
        for name in result.skipped
        if name in documents and documents[name]["info"]["version"] == versions[name]
    ]
    return Result(
        checked=result.checked + len(current),
        skipped=tuple(name for name in result.skipped if name not in current),
        found=result.found
        + tuple(
            Found(name, versions[name], vuln["id"], frozenset(vuln["aliases"]), tuple(vuln["fixed_in"]))
            for name in current
            for vuln in documents[name]["vulnerabilities"]
            if not vuln["withdrawn"]
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


def newest(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The registry's descriptions of the newest versions, by package. Packages that cannot be read are left out."""

    def read(name: str) -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(f"{REGISTRY}/{name}/json", timeout=REQUEST_SECONDS) as answer:
                document: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return None
        return document

    wanted = list(names)
    with ThreadPoolExecutor(8) as threads:
        read_documents = zip(wanted, threads.map(read, wanted), strict=True)
        return {name: document for name, document in read_documents if document is not None}


def main() -> int:
    """Audit the lock file and print the result. Returns the exit status."""
    reasons = ignored(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    versions = locked((ROOT / LOCK).read_text(encoding="utf-8"))
    try:
        result = result_of(run_tool(ROOT / LOCK))
    except AuditSkipped as reason:
        print(f"audit skipped: {reason}")
        return 0
    result = with_newest(result, versions, newest(result.skipped))
    for line in (problems := failures(result, reasons)):
        print(line)
    print(f"{result.checked} packages checked")
    if result.skipped:
        unchecked = ", ".join(f"{name} {versions[name]}" for name in result.skipped)
        print(f"{len(result.skipped)} packages not checked, because the registry has no data: {unchecked}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
