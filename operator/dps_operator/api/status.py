"""The `status` of a DPSRouter."""

from typing import Literal

from pydantic import ConfigDict, Field

from dps_operator.api.routing import Policy
from dps_operator.api.types import APIObject

ConditionType = Literal[
    "Ready",
    "Progressing",
    "SpecValid",
    "SpeculativePoolReady",
    "GreedyPoolReady",
    "GatewayReady",
    "SessionStoreReady",
    "AutoscalingActive",
    "RouteAccepted",
    "Monitored",
    "PrefixCacheShared",
    "PrefixCacheServing",
    "DemandMeasured",
    "RoutingCalibrated",
]

REVISIONS = 5
"""Number of revisions of a pool in the status."""


class Condition(APIObject):
    """A condition as in Kubernetes' metav1.Condition."""

    type: str = Field(max_length=316, description="Type of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Status of the condition.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Machine-readable reason, in CamelCase.",
    )
    message: str = Field(
        max_length=32768, description="Human-readable explanation, and how to resolve the problem."
    )
    observed_generation: int = Field(
        ge=0, description="Generation of the spec that the condition is based on."
    )
    last_transition_time: str = Field(
        description="Time of the last change of the condition's status.",
        json_schema_extra={"format": "date-time"},
    )


class PoolRevision(APIObject):
    """A pod template of a pool's engines."""

    revision: str = Field(description="Hash of the pod template.")
    engine: str = Field(description="Runtime and version of the engine.")
    image: str = Field(description="Image of the engine.")
    generation: int = Field(ge=0, description="Generation of the spec when the revision was applied.")
    time: str = Field(
        description="Time when the revision was applied.", json_schema_extra={"format": "date-time"}
    )


class PoolStatus(APIObject):
    """Replicas and revisions of one pool."""

    replicas: int = Field(description="Number of replicas.")
    ready_replicas: int = Field(description="Number of ready replicas.")
    scaling: Literal["External"] | None = Field(
        default=None, description="External if the operator does not set the number of replicas."
    )
    outdated: bool | None = Field(
        default=None,
        description="True if the pool keeps the pod template of another operator release; see engine.upgradePolicy.",
    )
    revisions: list[PoolRevision] | None = Field(
        default=None,
        max_length=REVISIONS,
        description="The pod template in use, followed by the previous ones, newest first.",
    )


class PoolsStatus(APIObject):
    """Replicas of both pools."""

    speculative: PoolStatus = Field(description="The speculative pool.")
    greedy: PoolStatus = Field(description="The greedy pool.")


class GatewayStatus(APIObject):
    """Replicas of the gateway, with the selector that the scale subresource needs."""

    replicas: int = Field(description="Number of replicas.")
    ready_replicas: int = Field(description="Number of ready replicas.")
    selector: str = Field(description="Label selector of the gateway's pods.")


class RecommendedBudget(APIObject):
    """The best split of the GPU budget, and the best rule for moves, in the simulation."""

    speculative_replicas: int = Field(ge=1, description="Replicas of the speculative pool.")
    greedy_replicas: int = Field(ge=1, description="Replicas of the greedy pool.")
    load_ratio: float = Field(
        ge=0.001,
        le=1000,
        description="Requests per replica of the speculative pool, divided by those of the greedy pool, towards which "
        "replicas should move.",
    )


class RecommendedRouting(APIObject):
    """The result of the last calibration that has found one."""

    policy: Policy = Field(description="Routing policy.")
    threshold_tokens: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Threshold in tokens; unset if the policy has none."
    )
    objective: str = Field(description="What was minimised.")
    seconds: float = Field(description="The minimised figure in the simulation, in seconds.")
    verdict: str = Field(description="Whether two pools are the right answer for the simulated sessions.")
    gpu_budget: RecommendedBudget | None = Field(
        default=None, description="The best split and rule for spec.gpuBudget; unset without one."
    )
    time: str = Field(
        description="Time when the calibration finished.", json_schema_extra={"format": "date-time"}
    )


class RoutingStatus(APIObject):
    """Routing policy in the gateway's configuration."""

    policy: str = Field(description="Routing policy.")
    threshold_tokens: int | None = Field(
        default=None, description="Threshold in tokens; unset if the spec's is null."
    )
    recommended: RecommendedRouting | None = Field(
        default=None, description="The result of spec.routing.calibration; unset before the first one."
    )


class GPUBudgetStatus(APIObject):
    """How the pools share the GPU budget."""

    speculative_replicas: int = Field(description="Replicas of the speculative pool.")
    greedy_replicas: int = Field(description="Replicas of the greedy pool.")
    rule: Literal["EqualLoad", "Calibrated"] = Field(
        default="EqualLoad",
        description="How replicas move. EqualLoad: towards the same number of requests per replica in both pools. "
        "Calibrated: towards status.routing.recommended.gpuBudget.loadRatio.",
    )
    last_move_time: str | None = Field(
        default=None,
        description="Time of the last move of a replica; unset if there was none.",
        json_schema_extra={"format": "date-time"},
    )


class ModelSize(APIObject):
    """The sizes of a model, read from its config.json on the Hugging Face Hub."""

    name: str = Field(max_length=512, description="Id of the model.")
    revision: str | None = Field(
        default=None, max_length=128, description="Branch, tag or commit; the default branch if unset."
    )
    parameters: int = Field(ge=1, description="Number of parameters.", json_schema_extra={"format": "int64"})
    layers: int = Field(ge=1, description="Number of layers.")
    heads: int = Field(ge=1, description="Number of attention heads.")
    kv_heads: int = Field(ge=1, description="Number of key and value heads.")
    intermediate_size: int | None = Field(
        default=None,
        ge=1,
        description="Size of the MLP in each layer; unset if an operator older than this field read the model.",
        json_schema_extra={"format": "int64"},
    )
    head_size: int = Field(ge=1, description="Values of a key or value head per token.")


class Status(APIObject):
    """Observed state of the DPSRouter."""

    model_config = ConfigDict(frozen=True)

    observed_generation: int = Field(description="Generation of the spec that the status is based on.")
    conditions: list[Condition] = Field(
        description="Conditions. Ready is True if the spec can be applied and every component can serve.",
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    url: str = Field(
        description="Base URL for clients: of the Ingress or the HTTPRoute if there is one, otherwise of the Service."
    )
    pools: PoolsStatus = Field(description="Replicas of both pools.")
    gateway: GatewayStatus = Field(description="Replicas of the gateway.")
    routing: RoutingStatus | None = Field(
        default=None, description="Routing policy in the gateway's configuration."
    )
    gpu_budget: GPUBudgetStatus | None = Field(
        default=None, description="How the pools share spec.gpuBudget; unset without one."
    )
    models: list[ModelSize] | None = Field(
        default=None,
        max_length=2,
        description="Models whose sizes the operator has read, to compute the memory of the engines.",
    )
