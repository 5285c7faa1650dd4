"""The parts of `make release` that need no images: versions, checksums and bills of materials."""

import json
import subprocess
from pathlib import Path

import pytest

from dps_tools.release import CHECKSUMS, ROOT, ReleaseError, checksums, release_version, versions
from dps_tools.sbom import bill_of_materials


def test_all_files_declare_the_same_version() -> None:
    declared = versions(ROOT)
    assert len(declared) == 3
    assert release_version(declared) == declared["pyproject.toml: version"]


def test_different_versions_are_refused_with_their_places() -> None:
    with pytest.raises(ReleaseError, match=r"pyproject.toml is 1, Chart.yaml is 2"):
        release_version({"pyproject.toml": "1", "Chart.yaml": "2"})


def test_sha256sum_accepts_the_checksums_and_notices_a_change(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/c.txt").write_text("c")
    text = checksums(tmp_path)
    assert [line.split()[1] for line in text.splitlines()] == ["a/c.txt", "b.txt"]
    (tmp_path / CHECKSUMS).write_text(text)
    assert checksums(tmp_path) == text, "the list does not contain itself"
    command = ["sha256sum", "--check", "--quiet", CHECKSUMS]
    subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "b.txt").write_text("changed")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1


def test_bill_of_materials_lists_python_and_debian_packages() -> None:
    inventory = {"pypi": [["Jinja2", "3.1.6"]], "deb": [["libc6", "2.36-9+deb12u9", "amd64"]]}
    libc = "pkg:deb/debian/libc6@2.36-9%2Bdeb12u9?arch=amd64"
    assert json.loads(bill_of_materials("dps-router/gateway", "0.1.0", inventory)) == {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "bom-ref": "dps-router/gateway",
                "name": "dps-router/gateway",
                "version": "0.1.0",
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": "pkg:pypi/jinja2@3.1.6",
                "name": "Jinja2",
                "version": "3.1.6",
                "purl": "pkg:pypi/jinja2@3.1.6",
            },
            {
                "type": "library",
                "bom-ref": libc,
                "name": "libc6",
                "version": "2.36-9+deb12u9",
                "purl": libc,
            },
        ],
    }
