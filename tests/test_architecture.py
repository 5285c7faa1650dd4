"""The maps in docs/architecture.md: they name existing modules, and every module of the packages that they cover."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dps_testkit.paths import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
PACKAGES = {
    "gateway": ROOT / "gateway/dps_gateway",
    "operator": ROOT / "operator/dps_operator",
    "plugin": ROOT / "engines/dps_sglang",
}
SECTIONS = {"gateway": "The request path", "operator": "The reconcile loop", "plugin": "The SGLang plugin"}
CONTRACTS = {
    "gateway": "The gateway's pure modules perform no I/O",
    "operator": "The operator's API, builders and status do no I/O",
}


def section(heading: str) -> str:
    """The text from a heading of the second level to the next one."""
    found = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def row(name: str) -> dict[str, str]:
    """The cells of one row of the table of pure code, I/O and wiring."""
    found = re.search(
        rf"^\| {name} \| (.*?) \| (.*?) \|$", section("Pure code, I/O and wiring"), flags=re.MULTILINE
    )
    assert found is not None
    return {"gateway": found[1], "operator": found[2]}


def paths(text: str) -> Iterator[str]:
    """The modules and folders that a text names, relative to the package."""
    for name in re.findall(r"`([\w/]*(?:\{[\w,]+\})?(?:\.py|(?<=\w)/))`", text):
        braces = re.search(r"\{(.*)\}", name)
        for choice in braces[1].split(",") if braces else [""]:
            yield re.sub(r"\{.*\}", choice, name)


def mapped(package: str) -> set[str]:
    table = "".join(row(name).get(package, "") for name in ("pure", "I/O", "wiring"))
    return set(paths(section(SECTIONS[package]) + table))


@pytest.mark.parametrize("package", PACKAGES)
def test_named_modules_exist(package: str) -> None:
    assert {name for name in mapped(package) if not (PACKAGES[package] / name).exists()} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_is_on_a_map(package: str) -> None:
    names = mapped(package)
    modules = {
        file.relative_to(PACKAGES[package])
        for file in PACKAGES[package].rglob("*.py")
        if not file.name.startswith("__")
    }

    def is_mapped(module: Path) -> bool:
        return str(module) in names or any(f"{folder}/" in names for folder in module.parents)

    assert {str(module) for module in modules if not is_mapped(module)} == set()


@pytest.mark.parametrize("package", CONTRACTS)
def test_pure_modules_are_those_that_import_linter_checks(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = [
        contract
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["name"] == CONTRACTS[package]
    ]
    documented = {
        f"{PACKAGES[package].name}.{name.removesuffix('.py').strip('/').replace('/', '.')}"
        for name in paths(row("pure")[package])
    }
    assert documented == set(contract["source_modules"])
