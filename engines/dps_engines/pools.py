"""The two pools of engines."""

from typing import Literal

PoolName = Literal["speculative", "greedy"]
POOLS: tuple[PoolName, PoolName] = ("speculative", "greedy")


def other_pool(name: PoolName) -> PoolName:
    """The pool that is not `name`."""
    return "greedy" if name == "speculative" else "speculative"
