"""The `status` of a DPSRouter."""

from typing import Literal

from pydantic import ConfigDict, Field

from dps_operator.api.types import APIObject

ConditionType = Literal[
    "Ready",
    "Progressing",
    "SpecValid",
    "SpeculativePoolReady",
    "GreedyPoolReady",
    "GatewayReady",
    "SessionStoreReady",
]


class Condition(APIObject):
    """A condition, in Kubernetes' own shape."""

    type: str = Field(max_length=316, description="Which condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Why, in one word.",
    )
    message: str = Field(max_length=32768, description="Why, and what to do about it.")
    observed_generation: int = Field(ge=0, description="Generation of the spec that this was seen for.")
    last_transition_time: str = Field(
        description="When the status last changed.", json_schema_extra={"format": "date-time"}
    )


class PoolStatus(APIObject):
    """Replicas of one pool."""

    replicas: int = Field(description="Replicas that exist.")
    ready_replicas: int = Field(description="Replicas that can serve.")


class PoolsStatus(APIObject):
    """Replicas of both pools."""

    speculative: PoolStatus = Field(description="The speculative pool.")
    greedy: PoolStatus = Field(description="The greedy pool.")


class GatewayStatus(PoolStatus):
    """Replicas of the gateway, in the shape that the scale subresource reads."""

    selector: str = Field(description="Label selector of the gateway's pods.")


class RoutingStatus(APIObject):
    """The routing rule that the gateways were given."""

    policy: str = Field(description="The policy.")
    threshold_tokens: int | None = Field(
        default=None, description="The threshold in tokens; none when every turn may speculate."
    )


class Status(APIObject):
    """What is."""

    model_config = ConfigDict(frozen=True)

    observed_generation: int = Field(description="Generation of the spec that this status is about.")
    conditions: list[Condition] = Field(
        description="Ready sums up the others.",
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    url: str = Field(description="Base URL for clients in the cluster, or of the ingress.")
    pools: PoolsStatus = Field(description="Replicas of both pools.")
    gateway: GatewayStatus = Field(description="Replicas of the gateway.")
    routing: RoutingStatus | None = Field(
        default=None, description="The routing rule that the gateways were given."
    )
