"""A software bill of materials of an image, in CycloneDX's JSON format. This module performs no I/O."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

SPEC_VERSION: Final = "1.6"
INVENTORY: Final = """
import importlib.metadata, json, subprocess
python = [[one.metadata["Name"], one.version] for one in importlib.metadata.distributions()]
query = ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\\n"]
debian = subprocess.run(query, capture_output=True, text=True, check=True).stdout
print(json.dumps({"pypi": sorted(python), "deb": sorted(line.split() for line in debian.splitlines())}))
"""
"""Program that prints the Python distributions and the Debian packages of the image that it runs in."""


def _python(name: str, version: str) -> dict[str, Any]:
    normalized = name.lower().replace("_", "-")
    purl = f"pkg:pypi/{quote(normalized)}@{quote(version)}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _debian(name: str, version: str, architecture: str) -> dict[str, Any]:
    purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?arch={architecture}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def bill_of_materials(image: str, version: str, inventory: Mapping[str, Sequence[Sequence[str]]]) -> str:
    """The document for `image`, from the output of INVENTORY. It has no timestamp, so that it is reproducible."""
    components = [_python(*entry) for entry in inventory["pypi"]]
    components += [_debian(*entry) for entry in inventory["deb"]]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {
            "component": {"type": "container", "bom-ref": image, "name": image, "version": version},
        },
        "components": components,
    }
    return json.dumps(document, indent=1) + "\n"
