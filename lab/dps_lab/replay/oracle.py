"""The expected routing decisions, computed from the recorded sessions alone.

The oracle is deliberately independent of the gateway: it renders and tokenizes every prompt as a whole, like an
engine.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dps_lab.workload.sessions import Message, Session
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.protocol import ChatRequest


@dataclass(frozen=True)
class Decision:
    """The decision for one turn: the pool, ΔL and L in tokens, and the turn's number, from 1."""

    pool: str
    delta_tokens: int
    prompt_tokens: int
    turn: int


class PromptCounter:
    """Counts the tokens of chat prompts, rendered and tokenized as a whole, as the emulated engines do."""

    def __init__(self, tokenizer: Path) -> None:
        """tokenizer: a folder with tokenizer.json and a chat template. Counting raises ValueError if it lacks them."""
        self._folder = tokenizer

    @cached_property
    def _prompts(self) -> Prompts:
        return Prompts.load(str(self._folder))  # takes seconds, and a plain replay does not need it

    def prompt_tokens(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> int:
        """L: the number of tokens of the rendered prompt, including tools and generation prompt."""
        chat = {"messages": messages, "tools": list(tools) or None}
        return len(self._prompts.encode_chat(ChatRequest.model_validate(chat)))

    def text_tokens(self, text: str) -> int:
        """The tokens of a text, without adding special tokens."""
        return self._prompts.text_tokens(text)

    def answer_tokens(self, answer: Message) -> int:
        """The approximate tokens that a model generates for an answer: its content, and its calls as JSON."""
        calls = [json.dumps(call["function"]) for call in answer.get("tool_calls") or ()]
        return max(1, self.text_tokens("\n".join([answer.get("content") or "", *calls])))


def delta_prefill_pool(delta_tokens: int, threshold_tokens: float) -> str:
    """`speculative` if ΔL <= τ, otherwise `greedy` (paper, Eq. 2)."""
    return "speculative" if delta_tokens <= threshold_tokens else "greedy"


def expected_decisions(
    session: Session, counter: PromptCounter, threshold_tokens: float
) -> Iterator[Decision]:
    """The decision for each turn of a session without faults: L_0 = 0, ΔL_t = L_t - L_{t-1} (paper, Eq. 1)."""
    previous = 0
    for turn, messages in enumerate(session.prompts(), start=1):
        length = counter.prompt_tokens(messages, session.tools)
        delta = length - previous
        yield Decision(delta_prefill_pool(delta, threshold_tokens), delta, length, turn)
        previous = length


def expected_by_session(
    sessions: Iterable[Session], counter: PromptCounter, threshold_tokens: float
) -> dict[str, list[Decision]]:
    """The expected decisions of every session, by session id."""
    return {session.id: list(expected_decisions(session, counter, threshold_tokens)) for session in sessions}
