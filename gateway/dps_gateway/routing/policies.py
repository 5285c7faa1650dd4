"""The routing policies: Delta-Prefill Switching (the paper's Eq. 2) and its baselines."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from dps_gateway.acceptance import KNOWN_WEIGHT, REFERENCE
from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_gateway.routing.decision import Decision, Policy, PolicyInput, Reason


def _compare(tokens: int, threshold_tokens: int | None) -> Decision:
    """Select the speculative pool if `tokens` does not exceed the threshold τ, else the greedy pool.

    τ = 0 is an exception: it selects the greedy pool for every turn, even for a retried turn with ΔL = 0, as in the
    greedy row of the paper's Table 3.
    """
    if threshold_tokens is None or (threshold_tokens > 0 and tokens <= threshold_tokens):
        return Decision(Pool.SPECULATIVE, Reason.WITHIN_THRESHOLD)
    return Decision(Pool.GREEDY, Reason.OVER_THRESHOLD)


@dataclass(frozen=True, slots=True)
class DeltaPrefill:
    """Delta-Prefill Switching: speculative if ΔL_t <= τ, else greedy (Eq. 2).

    `threshold_tokens` is τ. With 0 every turn goes to the greedy pool, with None every turn to the speculative pool.
    With `min_acceptance`, sessions with fewer expected tokens per verification go to the greedy pool as well. A session
    about which little is known is not one of them.
    """

    threshold_tokens: int | None
    min_acceptance: float | None = None

    def decide(self, turn: PolicyInput, /) -> Decision:
        decision = _compare(turn.delta_tokens, self.threshold_tokens)
        if self.min_acceptance is None:
            return decision
        expected = turn.acceptance.expected_tokens(max(REFERENCE, self.min_acceptance), turn.number)
        if expected < self.min_acceptance and turn.acceptance.weight(turn.number) >= KNOWN_WEIGHT:
            decision = Decision(Pool.GREEDY, Reason.OVER_THRESHOLD)
        return replace(decision, expected_tokens=expected)


@dataclass(frozen=True, slots=True)
class TotalLength:
    """The paper's ablation (section 4.4): the threshold applies to the length L_t of the whole prompt."""

    threshold_tokens: int | None

    def decide(self, turn: PolicyInput, /) -> Decision:
        return _compare(turn.prompt_tokens, self.threshold_tokens)


@dataclass(frozen=True, slots=True)
class AlwaysSpeculative:
    """Send every turn to the speculative pool (Method B of Table 1)."""

    def decide(self, turn: PolicyInput, /) -> Decision:
        return Decision(Pool.SPECULATIVE, Reason.FIXED)


@dataclass(frozen=True, slots=True)
class AlwaysGreedy:
    """Send every turn to the greedy pool (Method A of Table 1)."""

    def decide(self, turn: PolicyInput, /) -> Decision:
        return Decision(Pool.GREEDY, Reason.FIXED)


@dataclass(frozen=True, slots=True)
class Random:
    """Send every turn to either pool with equal probability, as a control group in experiments."""

    def decide(self, turn: PolicyInput, /) -> Decision:
        return Decision(Pool.SPECULATIVE if turn.draw < 0.5 else Pool.GREEDY, Reason.FIXED)


@dataclass(frozen=True, slots=True)
class Sticky:
    """Keep a session in the pool that served its last turn; send its first turn to the less loaded pool.

    Of two equally loaded pools, the speculative one is chosen.
    """

    def decide(self, turn: PolicyInput, /) -> Decision:
        if turn.last_pool is not None:
            return Decision(turn.last_pool, Reason.FIXED)
        ready = {pool: view.load for pool, view in turn.pools.items() if view.ready_replicas}
        return Decision(min(Pool, key=lambda pool: ready.get(pool, math.inf)), Reason.FIXED)


POLICIES: Final[Mapping[str, Callable[[int | None], Policy]]] = {
    "DeltaPrefill": DeltaPrefill,
    "TotalLength": TotalLength,
    "AlwaysSpeculative": lambda threshold_tokens: AlwaysSpeculative(),
    "AlwaysGreedy": lambda threshold_tokens: AlwaysGreedy(),
    "Random": lambda threshold_tokens: Random(),
    "Sticky": lambda threshold_tokens: Sticky(),
    "Adaptive": lambda threshold_tokens: Adaptive(),
}
"""Every policy by its name in `routing.policy`. To add a policy, define its class and register it here."""


def policy_named(name: str, threshold_tokens: int | None) -> Policy:
    """The policy registered as `name`; policies without a threshold ignore `threshold_tokens`.

    Raises ValueError if no such policy is registered.
    """
    build = POLICIES.get(name)
    if build is None:
        raise ValueError(f"there is no policy '{name}'; choose one of {', '.join(POLICIES)}")
    return build(threshold_tokens)
