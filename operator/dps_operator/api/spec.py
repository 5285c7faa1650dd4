"""The whole `spec` of a DPSRouter."""

from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from dps_operator.api.gateway import Gateway
from dps_operator.api.gpu_budget import BUDGET_ALONE, BUDGET_FOR_BOTH_POOLS, GPUBudget
from dps_operator.api.model import Engine, NodePool, ServedModel
from dps_operator.api.network_policy import NetworkPolicy
from dps_operator.api.pools import Pools
from dps_operator.api.prefix_cache import PrefixCache
from dps_operator.api.routing import Routing
from dps_operator.api.session_store import SessionStore
from dps_operator.api.telemetry import Telemetry
from dps_operator.api.types import APIObject, rules
from dps_operator.errors import SpecError

LONGEST_NAME = 50
"""Longest name of a DPSRouter, in characters: `<name>-speculative` must be a valid Service name."""


def _one_replica(pool: str) -> str:
    return (
        f"(!has({pool}.replicas) || {pool}.replicas == 1) && !has({pool}.autoscaling)"
        f" && (!has({pool}.scaling) || {pool}.scaling == 'Managed')"
    )


ONE_REPLICA_ON_SHARED_GPU = (
    "!has(self.placement) || self.placement != 'SharedGPU' || (!has(self.gpuBudget)"
    " && (!has(self.engine) || !has(self.engine.tensorParallel) || self.engine.tensorParallel == 1)"
    f" && {_one_replica('self.pools.speculative')}"
    f" && (!has(self.pools.greedy) || ({_one_replica('self.pools.greedy')})))",
    "with placement SharedGPU each pool has one replica on one GPU; remove gpuBudget, autoscaling, scaling External,"
    " and replicas and engine.tensorParallel other than 1",
)

_HAS_MIG = "has(self.nodePool) && has(self.nodePool.mig)"
_HAS_SHARING = "has(self.nodePool) && has(self.nodePool.sharing)"
SHARING_OF_A_SHARED_GPU = (
    f"!({_HAS_SHARING}) || (has(self.placement) && self.placement == 'SharedGPU')"
    " || (self.nodePool.sharing.strategy == 'TimeSlicing' && !self.nodePool.sharing.renamed)",
    "nodePool.sharing requires placement SharedGPU",
)
MPS_WITHOUT_MIG = (
    f"!({_HAS_MIG}) || !({_HAS_SHARING}) || self.nodePool.sharing.strategy != 'MPS'",
    "nodePool.mig cannot be combined with sharing strategy MPS, which NVIDIA's device plugin supports only for whole"
    " GPUs; use TimeSlicing, or remove nodePool.mig",
)
ONE_MIG_INSTANCE = (
    f"!({_HAS_MIG}) || !has(self.engine) || !has(self.engine.tensorParallel) || self.engine.tensorParallel == 1",
    "an engine cannot use several MIG instances; remove nodePool.mig or engine.tensorParallel",
)


class Spec(APIObject):
    """Desired state of the DPSRouter."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            BUDGET_ALONE,
            BUDGET_FOR_BOTH_POOLS,
            ONE_REPLICA_ON_SHARED_GPU,
            SHARING_OF_A_SHARED_GPU,
            MPS_WITHOUT_MIG,
            ONE_MIG_INSTANCE,
        )
    )

    model: ServedModel = Field(description="The target model.")
    engine: Engine = Field(default=Engine(), description="The inference engine of both pools.")
    node_pool: NodePool = Field(default=NodePool(), description="Nodes for the engines.")
    placement: Literal["SeparateGPUs", "SharedGPU"] = Field(
        default="SeparateGPUs",
        description="SeparateGPUs: each replica has its own GPUs, or its own instance of a GPU with nodePool.mig. "
        "SharedGPU: the engines of both pools share one GPU, on nodes whose device plugin offers each GPU twice by "
        "time-slicing or MPS; see nodePool.sharing.",
    )
    pools: Pools = Field(description="The two pools of engines.")
    gpu_budget: GPUBudget | None = Field(
        default=None,
        description="A number of GPUs that both pools share. The operator moves replicas between the pools by their "
        "demand; replicas, autoscaling and scaling External must not be set in the pools.",
    )
    gateway: Gateway = Field(default=Gateway(), description="The gateway pods and how clients reach them.")
    routing: Routing = Field(default=Routing(), description="The routing policy.")
    prefix_cache: PrefixCache | None = Field(
        default=None,
        description="A prefix cache that the engines of both pools share; if unset, each engine has its own.",
    )
    session_store: SessionStore = Field(
        default=SessionStore(), description="The Redis that stores session records."
    )
    telemetry: Telemetry = Field(default=Telemetry(), description="Traces and metrics.")
    network_policy: NetworkPolicy | None = Field(
        default=None,
        description="If set, network policies are created. With {}, only the gateway can connect to the engines and "
        "Redis.",
    )
    suspend: bool = Field(
        default=False,
        description="Stop all engines, which frees their GPUs. The gateway answers every request with 503; it and the "
        "session store keep running.",
    )
    paused: bool = Field(
        default=False,
        description="Apply no changes. The operator only updates the status until paused is false again.",
    )


def parse(spec: Any) -> Spec:
    """The parsed `spec`. Raises SpecError with the name of the first invalid field.

    The API server has already validated the schema; this detects an operator that is older than the CRD.
    """
    try:
        return Spec.model_validate(spec)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SpecError(f"spec.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
