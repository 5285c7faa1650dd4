"""What engines that share stored pages find of each prompt: played on SGLang and on the emulated engine.

A prompt has only one generated token, so that its length and content do not depend on the engine.
"""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dps_testkit.paths import ROOT

SOURCES = ("device", "host", "storage")


@dataclass(frozen=True)
class Step:
    """A request to one of the engines, GREEDY or SPECULATIVE. Prompts with the same text begin with the same tokens."""

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


GREEDY, SPECULATIVE = "greedy", "speculative"

STEPS: Sequence[Step] = (
    Step("nothing is cached", GREEDY, "a", 1000),
    Step("pages of a greedy engine", SPECULATIVE, "a", 1000),
    Step("the same prompt again", SPECULATIVE, "a", 1000),
    Step("its own pages", GREEDY, "a", 1000),
    Step("nothing is cached", SPECULATIVE, "b", 1000),
    Step("pages of a speculative engine", GREEDY, "b", 1000),
    Step("three complete pages", GREEDY, "c", 255),
    Step("fewer tokens than the threshold", SPECULATIVE, "c", 255),
    Step("four complete pages and one token", GREEDY, "d", 257),
    Step("as many tokens as the threshold", SPECULATIVE, "d", 257),
    Step("four complete pages", GREEDY, "e", 256),
    Step("the last token is always computed", SPECULATIVE, "e", 256),
    Step("four complete pages and a part", GREEDY, "f", 300),
    Step("a longer prompt", SPECULATIVE, "f", 700),
    Step("a first turn", GREEDY, "g", 1000),
    Step("a second turn elsewhere", SPECULATIVE, "g", 1200),
    Step("a third turn: what the other engine added is below the threshold", GREEDY, "g", 1500),
    Step("a fourth turn: what the other engine added is above the threshold", SPECULATIVE, "g", 1800),
    Step("one tenant", GREEDY, "h", 1000, "one"),
    Step("another tenant", SPECULATIVE, "h", 1000, "another"),
    Step("the first tenant elsewhere", SPECULATIVE, "h", 1000, "one"),
)


def recording(algorithm: str) -> Path:
    """The recording of a greedy engine and one with this algorithm, as SGLang spells it, with pages of 64 tokens."""
    return ROOT / "tests/local/contract" / f"sglang-0.5.23-storage-{algorithm.lower()}-64.json"


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
        name = f"{step.engine}, {step.tokens} tokens of {step.text}: {step.meaning}"
        found.append({"step": name, **tokens})
    return found
