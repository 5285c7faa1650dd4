"""The chart's README lists every value with its default."""

import json
from pathlib import Path

import pytest

from dps_tools.chart_readme import END, START, chart_readme

VALUES = "image: {tag: ''}\nworkers: 8\n"
SCHEMA = {
    "properties": {
        "image": {"properties": {"tag": {"description": "The tag.", "type": "string"}}},
        "workers": {"description": "Concurrency.", "type": "integer"},
        "global": {"type": "object"},
    }
}


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    (tmp_path / "values.yaml").write_text(VALUES)
    (tmp_path / "values.schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "README.md").write_text(f"before\n{START}old\n{END}\nafter\n")
    return tmp_path


def test_table_has_nested_values_with_defaults_and_descriptions(chart: Path) -> None:
    assert chart_readme(chart).splitlines() == [
        "before",
        START.strip(),
        "| value | default | description |",
        "| :-- | :-- | :-- |",
        '| `image.tag` | `""` | The tag. |',
        "| `workers` | `8` | Concurrency. |",
        END,
        "after",
    ]


def test_value_without_description_is_an_error(chart: Path) -> None:
    (chart / "values.schema.json").write_text(json.dumps({"properties": {"workers": {"type": "integer"}}}))
    with pytest.raises(KeyError, match="description"):
        chart_readme(chart)
