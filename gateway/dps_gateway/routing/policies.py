"""The static routing policies: Delta-Prefill Switching (the paper's Eq. 2) and what it is compared with."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

from dps_gateway.routing.decision import Decision, Policy, Pool, Reason, Turn


def _compare(tokens: int, threshold_tokens: int | None) -> Decision:
    """Speculate up to and including the threshold.

    τ = 0 is the greedy end of Table 3 and never speculates, not even on a repeated turn whose ΔL is 0.
    """
    if threshold_tokens is None or 0 < threshold_tokens >= tokens:
        return Decision(Pool.SPECULATIVE, Reason.WITHIN_THRESHOLD)
    return Decision(Pool.GREEDY, Reason.OVER_THRESHOLD)


@dataclass(frozen=True, slots=True)
class DeltaPrefill:
    """Delta-Prefill Switching: speculative if ΔL_t <= τ, else greedy (Eq. 2).

    `threshold_tokens` is τ. 0 sends everything to the greedy pool, None everything to the speculative one.
    """

    threshold_tokens: int | None

    def decide(self, turn: Turn, /) -> Decision:
        return _compare(turn.delta_tokens, self.threshold_tokens)


@dataclass(frozen=True, slots=True)
class TotalLength:
    """The paper's ablation (section 4.4): the same threshold, on the whole prompt length L_t."""

    threshold_tokens: int | None

    def decide(self, turn: Turn, /) -> Decision:
        return _compare(turn.prompt_tokens, self.threshold_tokens)


@dataclass(frozen=True, slots=True)
class AlwaysSpeculative:
    """Method B of Table 1."""

    def decide(self, turn: Turn, /) -> Decision:
        return Decision(Pool.SPECULATIVE, Reason.FIXED)


@dataclass(frozen=True, slots=True)
class AlwaysGreedy:
    """Method A of Table 1."""

    def decide(self, turn: Turn, /) -> Decision:
        return Decision(Pool.GREEDY, Reason.FIXED)


@dataclass(frozen=True, slots=True)
class Random:
    """A fair split that ignores the turn: the control group of an experiment."""

    def decide(self, turn: Turn, /) -> Decision:
        return Decision(Pool.SPECULATIVE if turn.draw < 0.5 else Pool.GREEDY, Reason.FIXED)


PolicyName = Literal["DeltaPrefill", "TotalLength", "AlwaysSpeculative", "AlwaysGreedy", "Random"]
POLICIES: Final[tuple[str, ...]] = get_args(PolicyName)


def policy_named(name: str, threshold_tokens: int | None) -> Policy:
    """The policy of that name; the threshold (tokens) matters to the two that compare with one.

    Raises ValueError for a name that is not in POLICIES.
    """
    match name:
        case "DeltaPrefill":
            return DeltaPrefill(threshold_tokens)
        case "TotalLength":
            return TotalLength(threshold_tokens)
        case "AlwaysSpeculative":
            return AlwaysSpeculative()
        case "AlwaysGreedy":
            return AlwaysGreedy()
        case "Random":
            return Random()
    raise ValueError(f"there is no policy '{name}'; choose one of {', '.join(POLICIES)}")
