"""The fragments of a DPSRouter's spec in the documentation."""

from typing import Any

import yaml

from dps_operator.api import Spec
from dps_testkit.documents import blocks

DOCUMENTS = ("docs/installing.md", "docs/operating.md", "docs/prefix-cache.md")
FIELDS = {field.alias for field in Spec.model_fields.values()}


def fragments() -> dict[str, dict[str, Any]]:
    """The YAML blocks whose keys are fields of a spec, by document and line."""
    found = {
        f"{document}:{block.line}": yaml.safe_load(block.text)
        for document in DOCUMENTS
        for block in blocks(document)
        if block.language == "yaml"
    }
    return {place: value for place, value in found.items() if value.keys() <= FIELDS}
