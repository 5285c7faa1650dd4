"""Building blocks of the API's models: the strict base, CEL rules, parts of Kubernetes' own types."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict, JsonValue

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

FreeObject = dict[str, Any]
"""An object of Kubernetes' own whose fields the API server checks when the operator applies what holds it."""

Name = Annotated[str, Field(min_length=1, max_length=253)]
"""The name of an object in the DPSRouter's own namespace."""


def rules(*pairs: tuple[str, str]) -> JsonDict:
    """CEL rules of an object, as (expression, message that says what to change), for `json_schema_extra`."""
    validations: list[JsonValue] = [{"rule": rule, "message": message} for rule, message in pairs]
    return {"x-kubernetes-validations": validations}


class APIObject(BaseModel):
    """An object of the API: camelCase names, unknown fields refused, never changed once read."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class SecretKeyRef(APIObject):
    """One key of a Secret in the DPSRouter's namespace."""

    name: Name = Field(description="Name of the Secret.")
    key: str = Field(min_length=1, max_length=253, description="Key in the Secret.")


class EnvVar(APIObject):
    """An environment variable, as in a container."""

    name: str = Field(min_length=1, max_length=253, description="Name of the variable.")
    value: str | None = Field(default=None, description="Its value.")
    value_from: FreeObject | None = Field(
        default=None, description="Where its value comes from, as in a container: secretKeyRef, fieldRef, …"
    )


class Toleration(APIObject):
    """A toleration, as in a pod."""

    key: str | None = Field(default=None, description="Key of the taint; every key when left out.")
    operator: Literal["Exists", "Equal"] | None = Field(
        default=None, description="How the value is compared; Equal when left out."
    )
    value: str | None = Field(default=None, description="Value of the taint, with operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint; every effect when left out."
    )
    toleration_seconds: int | None = Field(
        default=None, description="Seconds that a NoExecute taint is tolerated; for ever when left out."
    )


class Resources(APIObject):
    """Resource requests and limits, as in a container. What is left out keeps the operator's default."""

    requests: dict[str, Quantity] | None = Field(default=None, description="What the scheduler sets aside.")
    limits: dict[str, Quantity] | None = Field(default=None, description="What the container may not exceed.")


class TemplateMetadata(APIObject):
    """Labels and annotations added to pods."""

    labels: dict[str, str] | None = Field(default=None, description="Labels added to the pods.")
    annotations: dict[str, str] | None = Field(default=None, description="Annotations added to the pods.")


class PodTemplate(APIObject):
    """Laid over the pod template that the operator makes, as a strategic merge: named things by name."""

    metadata: TemplateMetadata | None = Field(
        default=None, description="Labels and annotations added to the pods."
    )
    spec: FreeObject | None = Field(
        default=None,
        description="A pod spec; containers, volumes and env merge by name, other lists are replaced.",
    )


def to_wire(model: APIObject) -> dict[str, Any]:
    """The object as it stands in a manifest: camelCase, without what was not set."""
    return model.model_dump(by_alias=True, exclude_none=True)


def plain_env(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """A container's `env` from plain names and values, in their order."""
    return [{"name": name, "value": value} for name, value in env.items()]
