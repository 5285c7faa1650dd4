"""The CRD generated from the API models."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from dps_operator.api.spec import parse
from dps_operator.errors import SpecError
from dps_testkit.operator.routers import EVERYTHING, SMALLEST
from dps_tools.crd import crd, object_schema, structural


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field under a schema, with its path."""
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}", child
        yield from fields(child, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")


SPEC = dict(fields(object_schema()["properties"]["spec"]))
STATUS = dict(fields(object_schema()["properties"]["status"]))


def test_api_server_adds_no_field_to_a_status_that_the_operator_has_not_written() -> None:
    """Otherwise the status would always differ from the operator's, which would write it in every reconcile."""
    written = {".gpuBudget.rule"}
    assert {path for path, schema in STATUS.items() if "default" in schema} == written


def test_every_field_has_a_description_and_a_type() -> None:
    for path, field in {**SPEC, **STATUS}.items():
        assert field.get("description"), path
        assert "type" in field or "x-kubernetes-int-or-string" in field, path


def test_every_list_is_bounded_to_limit_the_cost_of_rules() -> None:
    for path, field in SPEC.items():
        if field.get("type") == "array":
            assert "maxItems" in field, path


def test_every_rule_names_a_field_and_uses_only_existing_fields() -> None:
    for path, field in SPEC.items():
        for rule in field.get("x-kubernetes-validations", []):
            names = set(field["properties"])
            assert names & set(re.findall(r"\w+", rule["message"])), path
            assert set(re.findall(r"(?:self|oldSelf)\.(\w+)", rule["rule"])) <= names, path


@pytest.mark.parametrize("keyword", ["exclusiveMinimum", "exclusiveMaximum", "multipleOf", "uniqueItems"])
def test_constraint_that_the_crd_would_lose_is_refused(keyword: str) -> None:
    with pytest.raises(ValueError, match=f"the CRD cannot express {keyword}"):
        structural({"type": "number", keyword: 1}, {})


def test_constraint_of_an_optional_field_that_the_crd_would_lose_is_refused() -> None:
    optional = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}
    with pytest.raises(ValueError, match="the CRD cannot express exclusiveMinimum"):
        structural({"type": "object", "properties": {"size": optional}}, {})


def test_only_the_threshold_is_nullable() -> None:
    assert [path for path, field in SPEC.items() if field.get("nullable")] == [".routing.thresholdTokens"]


def test_printer_columns_and_short_name_match_the_contract() -> None:
    spec = crd()["spec"]
    assert spec["names"]["shortNames"] == ["dps"]
    (version,) = spec["versions"]
    shown = [one["name"] for one in version["additionalPrinterColumns"] if not one.get("priority")]
    assert shown == ["Ready", "Policy", "Threshold", "Speculative", "Greedy", "Gateway", "Age"]


@pytest.mark.parametrize("spec", [SMALLEST, EVERYTHING])
def test_valid_spec_is_parsed(spec: dict[str, Any]) -> None:
    assert parse(spec).model.name == spec["model"]["name"]


def test_invalid_field_is_named_in_the_error() -> None:
    with pytest.raises(SpecError, match=r"^spec\.routing\.policy: "):
        parse({**SMALLEST, "routing": {"policy": "Fastest"}})
