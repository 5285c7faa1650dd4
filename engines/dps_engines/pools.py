"""The two pools of engines."""

from typing import Literal

PoolName = Literal["speculative", "greedy"]
POOLS: tuple[PoolName, PoolName] = ("speculative", "greedy")
