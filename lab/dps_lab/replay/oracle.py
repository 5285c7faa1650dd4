"""The expected routing decisions, computed from the recorded sessions alone.

The oracle is deliberately independent of the gateway's counting: it renders and tokenizes every prompt as a whole, like
an engine.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from dps_lab.workload.sessions import Session
from dps_local.emulated_sglang.prompt import Prompts


@dataclass(frozen=True)
class Decision:
    """The decision for one turn: the pool, ΔL and L in tokens, and the turn's number, from 1."""

    pool: str
    delta_tokens: int
    prompt_tokens: int
    turn: int


def delta_prefill_pool(delta_tokens: int, threshold_tokens: float) -> str:
    """`speculative` if ΔL <= τ, otherwise `greedy` (paper, Eq. 2)."""
    return "speculative" if delta_tokens <= threshold_tokens else "greedy"


def expected_by_session(
    sessions: Iterable[Session], prompts: Prompts, threshold_tokens: float
) -> dict[str, list[Decision]]:
    """The decision for each turn of each session without faults: L_0 = 0, ΔL_t = L_t - L_{t-1} (paper, Eq. 1)."""
    expected: dict[str, list[Decision]] = {}
    for session in sessions:
        lengths = [0, *(prompts.prompt_tokens(messages, session.tools) for messages in session.prompts())]
        expected[session.id] = [
            Decision(delta_prefill_pool(length - previous, threshold_tokens), length - previous, length, turn)
            for turn, (previous, length) in enumerate(pairwise(lengths), start=1)
        ]
    return expected
