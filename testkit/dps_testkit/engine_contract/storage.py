"""What engines that share stored pages find of each prompt: played on SGLang and on the emulated engine.

A prompt has only one generated token, so that its length and content do not depend on the engine. Pages have 64 tokens.
"""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PAGE_TOKENS = 64
SOURCES = ("device", "host", "storage")


@dataclass(frozen=True)
class Step:
    """A request. Prompts with the same text begin with the same tokens."""

    meaning: str
    engine: str
    text: str
    tokens: int
    salt: str = ""

    @property
    def body(self) -> dict[str, Any]:
        """The request to /generate."""
        ids = random.Random(self.text).choices(range(100, 100_000), k=self.tokens)
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        return {"input_ids": ids, "sampling_params": sampling, "extra_key": f"contract {self.salt}"}


GREEDY, STANDALONE = "greedy", "STANDALONE"

STEPS: Sequence[Step] = (
    Step("nothing is cached", GREEDY, "a", 1000),
    Step("pages of a greedy engine", STANDALONE, "a", 1000),
    Step("the same prompt again", STANDALONE, "a", 1000),
    Step("its own pages", GREEDY, "a", 1000),
    Step("nothing is cached", STANDALONE, "b", 1000),
    Step("pages of a STANDALONE engine", GREEDY, "b", 1000),
    Step("three complete pages", GREEDY, "c", 255),
    Step("fewer tokens than the threshold", STANDALONE, "c", 255),
    Step("four complete pages and one token", GREEDY, "d", 257),
    Step("as many tokens as the threshold", STANDALONE, "d", 257),
    Step("four complete pages", GREEDY, "e", 256),
    Step("the last token is always computed", STANDALONE, "e", 256),
    Step("four complete pages and a part", GREEDY, "f", 300),
    Step("a longer prompt", STANDALONE, "f", 700),
    Step("a first turn", GREEDY, "g", 1000),
    Step("a second turn elsewhere", STANDALONE, "g", 1200),
    Step("a third turn: what the other engine added is below the threshold", GREEDY, "g", 1500),
    Step("a fourth turn: what the other engine added is above the threshold", STANDALONE, "g", 1800),
    Step("one tenant", GREEDY, "h", 1000, "one"),
    Step("another tenant", STANDALONE, "h", 1000, "another"),
    Step("the first tenant elsewhere", STANDALONE, "h", 1000, "one"),
)


async def play(request: Callable[[Step], Awaitable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """For each step, the tokens of its prompt that the engine found, by source.

    request: sends a step's request, and returns the answer's `meta_info` when the prompt's pages are stored.
    """
    found = []
    for step in STEPS:
        meta = await request(step)
        details = meta.get("cached_tokens_details") or {}
        tokens = {source: details.get(source, 0) for source in SOURCES}
        assert sum(tokens.values()) == meta["cached_tokens"]
        found.append(
            {"step": f"{step.engine}, {step.tokens} tokens of {step.text}: {step.meaning}", **tokens}
        )
    return found
