"""The CRD that follows from the models, and the files that follow from the CRD."""

from collections.abc import Iterator
from typing import Any

import pytest

from dps_operator.api.spec import parse
from dps_operator.errors import SpecError
from dps_testkit.operator.routers import EVERYTHING, SMALLEST
from dps_tools.crd import crd, object_schema


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field under a schema, with its path."""
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from fields(child, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


SPEC = dict(fields(object_schema()["properties"]["spec"]))
STATUS = dict(fields(object_schema()["properties"]["status"]))


def test_every_field_is_described_and_typed() -> None:
    for path, field in {**SPEC, **STATUS}.items():
        assert field.get("description"), path
        assert "type" in field or "x-kubernetes-int-or-string" in field, path


def test_lists_are_bounded_so_that_rules_stay_cheap() -> None:
    for path, field in SPEC.items():
        if field.get("type") == "array":
            assert "maxItems" in field, path


def test_a_rule_speaks_in_a_sentence_that_says_what_to_change() -> None:
    for path, field in SPEC.items():
        for rule in field.get("x-kubernetes-validations", []):
            assert len(rule["message"]) > 20, path
            assert not rule["message"].startswith("failed"), path


def test_null_is_a_value_of_the_threshold_alone() -> None:
    assert [path for path, field in SPEC.items() if field.get("nullable")] == [".routing.thresholdTokens"]


def test_columns_and_names_are_the_contracts() -> None:
    spec = crd()["spec"]
    assert spec["names"]["shortNames"] == ["dps"]
    (version,) = spec["versions"]
    shown = [one["name"] for one in version["additionalPrinterColumns"] if not one.get("priority")]
    assert shown == ["Ready", "Policy", "Threshold", "Spec", "Greedy", "Gateway", "Age"]


@pytest.mark.parametrize("spec", [SMALLEST, EVERYTHING])
def test_a_good_spec_is_read(spec: dict[str, Any]) -> None:
    assert parse(spec).model.name == spec["model"]["name"]


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(SpecError, match=r"^spec\.routing\.policy: "):
        parse({**SMALLEST, "routing": {"policy": "Fastest"}})
