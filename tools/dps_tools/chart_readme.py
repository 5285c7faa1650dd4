"""The table of values in the chart's README, from the defaults in values.yaml and the schema's descriptions."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

START: Final = "<!-- values -->\n"
END: Final = "<!-- /values -->"
HEADER: Final = "| value | default | description |\n| :-- | :-- | :-- |\n"


def _rows(schema: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value_schema in schema["properties"].items():
        path = f"{prefix}{name}"
        if "properties" in value_schema:
            yield from _rows(value_schema, values[name], f"{path}.")
        elif name in values:
            default = json.dumps(values[name])
            yield f"| `{path}` | `{default}` | {value_schema['description']} |\n"


def chart_readme(chart: Path) -> str:
    """The chart's README with a current table. Raises KeyError if a value has no description in the schema."""
    schema = json.loads((chart / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((chart / "values.yaml").read_text(encoding="utf-8"))
    table = HEADER + "".join(_rows(schema, values))
    readme = (chart / "README.md").read_text(encoding="utf-8")
    return re.sub(f"(?<={START}).*?(?={END})", lambda _: table, readme, flags=re.DOTALL)
