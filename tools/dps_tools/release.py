"""Writes the files of a release into a folder, and publishes nothing. Run by `make release`, after `make images`.

python -m dps_tools.release HELM FOLDER

An earlier content of the folder is deleted. The files are archives of the images, a bill of materials of each, the
packaged chart, the two manifests, the Python wheel, and the checksums of all of these.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from dps_tools.sbom import INVENTORY, bill_of_materials

ROOT: Final = Path(__file__).parents[2]
CHECKSUMS: Final = "SHA256SUMS"
IMAGES: Final = ("gateway", "operator", "lab", "engine")
CHART: Final = "charts/dps-router"
NAMESPACE: Final = """\
apiVersion: v1
kind: Namespace
metadata:
  name: dps-system
  labels:
    pod-security.kubernetes.io/enforce: restricted
"""
UV: Final = Path(sys.executable).with_name("uv")


class ReleaseError(Exception):
    """The release cannot be built; the message says what to change."""


def versions(root: Path) -> dict[str, str]:
    """The version that each file declares."""
    project = re.search(
        r'^version = "(.+)"$', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    chart = yaml.safe_load((root / "charts/dps-router/Chart.yaml").read_text(encoding="utf-8"))
    return {
        "pyproject.toml: version": project[1] if project else "",
        "Chart.yaml: version": chart["version"],
        "Chart.yaml: appVersion": chart["appVersion"],
    }


def release_version(declared: Mapping[str, str]) -> str:
    """The version of the release. Raises ReleaseError if files declare different ones."""
    if len(set(declared.values())) != 1:
        listed = ", ".join(f"{place} is {version}" for place, version in declared.items())
        raise ReleaseError(f"the versions must be equal: {listed}")
    return next(iter(declared.values()))


def checksums(folder: Path) -> str:
    """SHA-256 digests of all files in `folder`, in the format that `sha256sum --check` reads."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {path.relative_to(folder)}\n")
    return "".join(lines)


def _run(*command: str | Path) -> str:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def install_manifest(helm: Path) -> str:
    """The chart with its default values and its namespace, as one file for `kubectl apply --server-side`.

    The CRD lacks Helm's annotation `keep`, because `kubectl delete` of the file should delete it.
    """
    options = ("--namespace", "dps-system", "--no-hooks", "--set", "crds.keep=false")
    return f"{NAMESPACE}{_run(helm, 'template', 'dps-router', CHART, *options)}\n"


def _image(folder: Path, name: str, version: str) -> None:
    """The archive of one image that `make images` has built, and its bill of materials."""
    image = f"docker.io/dps-router/{name}:{version}"
    _run("buildah", "push", "--quiet", image, f"docker-archive:{folder}/{name}-{version}.tar:{image}")
    container = _run("buildah", "from", image)
    try:
        command = ("buildah", "run", "--isolation", "chroot", container, "--")
        inventory = json.loads(_run(*command, "python3", "-c", INVENTORY))
    finally:
        _run("buildah", "rm", container)
    text = bill_of_materials(f"dps-router/{name}", version, inventory)
    (folder / f"{name}-{version}.cdx.json").write_text(text, encoding="utf-8")


def build(helm: Path, folder: Path) -> None:
    """Write all files. Raises ReleaseError, or CalledProcessError if a tool fails."""
    version = release_version(versions(ROOT))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in IMAGES:
        _image(folder, name, version)
    _run(helm, "package", CHART, "--destination", folder)
    _run(UV, "build", "--quiet", "--wheel", "--out-dir", folder)
    (folder / ".gitignore").unlink(missing_ok=True)
    (folder / "install.yaml").write_text(install_manifest(helm), encoding="utf-8")
    shutil.copy(ROOT / CHART / "files/crd.yaml", folder)
    (folder / CHECKSUMS).write_text(checksums(folder), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Build the release, and list its files with their sizes."""
    helm, folder = (Path(argument).resolve() for argument in arguments)
    try:
        build(helm, folder)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:9.2f} MiB  {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
