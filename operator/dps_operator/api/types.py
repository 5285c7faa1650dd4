"""Common parts of the API models: the base class, CEL rules, and types shared with Kubernetes."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict, JsonValue

from dps_operator.api.shapes import checked_pod_spec

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"

Quantity = Annotated[
    str,
    BeforeValidator(str),
    Field(pattern=QUANTITY),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": QUANTITY,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""A Kubernetes quantity: a whole number, or a string such as `500m` or `16Gi`."""

INT_OR_PERCENT = r"^[0-9]+%$"


def _int_or_percent(value: Any) -> int | str:
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, str) and re.fullmatch(INT_OR_PERCENT, value):
        return value
    raise ValueError("must be a whole number, or a percentage such as 25%")


IntOrPercent = Annotated[
    int | str,
    PlainValidator(_int_or_percent),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": INT_OR_PERCENT,
            "minimum": 0,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""A number of pods, or a percentage of the replicas such as `25%`."""

FreeObject = dict[str, Any]
"""A Kubernetes object that is copied into a child unchecked; the API server validates it when the child is applied."""

Name = Annotated[str, Field(min_length=1, max_length=253)]
"""The name of an object in the DPSRouter's namespace."""


def rules(*pairs: tuple[str, str]) -> JsonDict:
    """The value of `json_schema_extra` for CEL rules, which are pairs of an expression and a message."""
    validations: list[JsonValue] = [{"rule": rule, "message": message} for rule, message in pairs]
    return {"x-kubernetes-validations": validations}


class APIObject(BaseModel):
    """Base of the API objects: camelCase names, unknown fields rejected, immutable."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class SecretKeyRef(APIObject):
    """One key of a Secret in the DPSRouter's namespace."""

    name: Name = Field(description="Name of the Secret.")
    key: str = Field(min_length=1, max_length=253, description="Key in the Secret.")


class EnvVar(APIObject):
    """An environment variable, as in a container."""

    name: str = Field(min_length=1, max_length=253, description="Name of the variable.")
    value: str | None = Field(default=None, description="Value of the variable.")
    value_from: FreeObject | None = Field(
        default=None, description="Source of the value, as in a container: secretKeyRef, fieldRef, …"
    )


class Toleration(APIObject):
    """A toleration, as in a pod."""

    key: str | None = Field(default=None, description="Key of the taint; all keys if unset.")
    operator: Literal["Exists", "Equal"] | None = Field(
        default=None, description="How the value is compared; Equal if unset."
    )
    value: str | None = Field(default=None, description="Value of the taint, for operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint; all effects if unset."
    )
    toleration_seconds: int | None = Field(
        default=None, description="Seconds that a NoExecute taint is tolerated; unlimited if unset."
    )


class Resources(APIObject):
    """Resource requests and limits, as in a container. Unset entries keep the operator's defaults."""

    requests: dict[str, Quantity] | None = Field(
        default=None, description="Minimum amounts that the scheduler reserves."
    )
    limits: dict[str, Quantity] | None = Field(
        default=None, description="Maximum amounts that the container may use."
    )


class TemplateMetadata(APIObject):
    """Labels and annotations added to pods."""

    labels: dict[str, str] | None = Field(default=None, description="Labels added to the pods.")
    annotations: dict[str, str] | None = Field(default=None, description="Annotations added to the pods.")


class PodTemplate(APIObject):
    """A pod template to merge into the generated one. Named items are merged by name."""

    metadata: TemplateMetadata | None = Field(
        default=None, description="Labels and annotations added to the pods."
    )
    spec: Annotated[FreeObject, AfterValidator(checked_pod_spec)] | None = Field(
        default=None,
        description="A pod spec. Containers, volumes, environment variables and image pull secrets are merged by "
        "name, volume mounts by path, ports by number, and topology spread constraints by topologyKey; other lists, "
        "such as tolerations, replace the generated ones. A volume's source, a variable's value and a probe's handler "
        "replace one of another kind.",
    )


def to_wire(model: APIObject) -> dict[str, Any]:
    """The object as in a manifest: camelCase names, unset fields omitted."""
    return model.model_dump(by_alias=True, exclude_none=True)


def plain_env(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """A container's `env` with these names and values, in the same order."""
    return [{"name": name, "value": value} for name, value in env.items()]


_UNITS = {
    "m": Decimal("0.001"),
    **{unit: Decimal(1000**power) for power, unit in enumerate(("", "k", "M", "G", "T", "P", "E"))},
    **{unit: Decimal(1024**power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}


def quantity_value(quantity: str) -> Decimal:
    """The value of a Kubernetes quantity, for example in bytes or CPU cores."""
    number = quantity.rstrip("EGKMPTikm")
    return Decimal(number) * _UNITS[quantity[len(number) :]]


def quantity_bytes(quantity: str) -> int:
    """A Kubernetes quantity in bytes, rounded down."""
    return int(quantity_value(quantity))
