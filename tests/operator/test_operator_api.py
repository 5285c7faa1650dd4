"""The CRD generated from the API models."""

from collections.abc import Iterator
from typing import Any

import pytest

from dps_operator.api import parse
from dps_operator.errors import SpecError
from dps_testkit.operator.routers import SMALLEST
from dps_tools.crd import object_schema, structural


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


@pytest.mark.parametrize("keyword", ["exclusiveMaximum", "multipleOf", "uniqueItems"])
def test_constraint_that_the_crd_would_lose_is_refused(keyword: str) -> None:
    with pytest.raises(ValueError, match=f"the CRD cannot express {keyword}"):
        structural({"type": "number", keyword: 1}, {})


def test_an_exclusive_minimum_has_the_form_of_openapi_3_0() -> None:
    """In later versions of JSON Schema, which Pydantic generates, it is a number."""
    found = structural({"type": "number", "exclusiveMinimum": 0}, {})
    assert found == {"type": "number", "minimum": 0, "exclusiveMinimum": True}


def test_invalid_field_is_named_in_the_error() -> None:
    with pytest.raises(SpecError, match=r"^spec\.routing\.policy: "):
        parse({**SMALLEST, "routing": {"policy": "Fastest"}})
