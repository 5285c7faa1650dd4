"""`spec.gpuBudget`: a number of GPUs that the two pools share."""

from pydantic import Field

from dps_operator.api.types import APIObject


def _unscaled(pool: str) -> str:
    return (
        f"!has({pool}.replicas) && !has({pool}.autoscaling)"
        f" && (!has({pool}.scaling) || {pool}.scaling == 'Managed')"
    )


BUDGET_ALONE = (
    f"!has(self.gpuBudget) || ({_unscaled('self.pools.speculative')}"
    f" && (!has(self.pools.greedy) || ({_unscaled('self.pools.greedy')})))",
    "replicas, autoscaling and scaling External must not be set in a pool with gpuBudget, which determines the number"
    " of replicas of both pools",
)
BUDGET_FOR_BOTH_POOLS = (
    "!has(self.gpuBudget) || self.gpuBudget.gpus >= 2 *"
    " (has(self.engine) && has(self.engine.tensorParallel) ? self.engine.tensorParallel : 1)",
    "gpuBudget.gpus must be at least 2 * engine.tensorParallel, because each pool keeps one replica",
)


class GPUBudget(APIObject):
    """GPUs that both pools share. The operator moves replicas between the pools by their demand."""

    gpus: int = Field(
        ge=2,
        le=2000,
        description="GPUs of both pools together. Each replica uses engine.tensorParallel of them, and each pool has "
        "at least one replica.",
    )
    cooldown_seconds: int = Field(
        default=600,
        ge=10,
        le=86_400,
        description="Minimum time in seconds between two moves of a replica. The demand is averaged with a half-life "
        "of a quarter of this time.",
    )
