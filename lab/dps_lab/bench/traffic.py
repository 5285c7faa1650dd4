"""The requests of one traffic pattern of the benchmark, built before the measurement starts."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from dps_lab.bench.text import text

MODEL: Final = "Qwen/Qwen2.5-7B-Instruct"
PATH: Final = "/v1/chat/completions"
TURNS: Final = 8
"""Timed turns of a growing session. Its first turn is not timed."""
CHUNKS: Final = 32
"""Chunks of an answer, unless a traffic pattern has another number."""

_SYSTEM: Final = "You are a careful assistant of an operations team. Answer briefly, with the tools you have."

Sessions = Literal["distinct", "growing"]
Count = Callable[[str], int]
"""Counts the tokens of a text, recognising special tokens in it."""


@dataclass(frozen=True)
class Content:
    """The size of request bodies in bytes, and the kind of sessions.

    distinct: every request is the first turn of a session with unique content.
    growing: every request is a later turn, which repeats the session's history and appends an answer and a new
    question.
    """

    size: int
    sessions: Sessions

    def __str__(self) -> str:
        return f"{self.size // 1024} KB, {self.sessions} sessions"


@dataclass(frozen=True)
class TrafficPattern:
    """One kind of traffic: streaming or not, the content of the requests, and the chunks of each answer."""

    stream: bool
    content: Content
    chunks: int = CHUNKS

    def __str__(self) -> str:
        return f"{f'{self.chunks}-chunk stream' if self.stream else 'non-streaming'}, {self.content}"


@dataclass(frozen=True)
class Traffic:
    """Requests by connection.

    warm: requests to send before the measurement, so that the sessions have a history.
    shared: all connections share one sequence of timed requests, and a free connection takes the next one.
    """

    warm: list[list[bytes]]
    timed: list[list[bytes]]
    shared: bool

    def sequences(self) -> list[Iterator[bytes]]:
        """Fresh iterators over the timed requests, one per connection."""
        if self.shared:
            return [iter(self.timed[0])] * len(self.timed)
        return [iter(mine) for mine in self.timed]


@dataclass(frozen=True)
class _Message:
    role: str
    content: str
    tokens: int


class _Writer:
    """Writes requests like those of an unmodified OpenAI client, without a session id but with a `seed`.

    The seed is the prompt's length in tokens, so that the fake engine can report it as usage without a
    tokenizer. It is the sum over the messages as rendered in ChatML; tokens do not merge across <|im_start|>.
    """

    def __init__(self, random: Random, pattern: TrafficPattern, count: Count) -> None:
        self._random = random
        self._pattern = pattern
        self._count = count
        self._generation_prompt = count("<|im_start|>assistant\n")
        self.system = self._message("system", _SYSTEM)

    def message(self, role: str, size: int) -> _Message:
        return self._message(role, text(self._random, size))

    def request(self, messages: list[_Message]) -> bytes:
        body = {
            "model": MODEL,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "stream": self._pattern.stream,
            "max_tokens": self._pattern.chunks,
            "seed": self._generation_prompt + sum(message.tokens for message in messages),
        }
        data = json.dumps(body, separators=(",", ":")).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nAccept: */*\r\nUser-Agent: dps-bench\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def _message(self, role: str, content: str) -> _Message:
        return _Message(role, content, self._count(f"<|im_start|>{role}\n{content}<|im_end|>\n"))


def traffic(
    pattern: TrafficPattern, seed: str, sessions: int, connections: int, count: Count, turns: int = TURNS
) -> Traffic:
    """The requests of one traffic pattern. They depend on `seed` only; different seeds have no session in common.

    turns: timed turns of a growing session.
    """
    writer = _Writer(Random(f"{pattern} {seed}"), pattern, count)
    if pattern.content.sessions == "distinct":
        size = pattern.content.size - 400
        requests = [writer.request([writer.system, writer.message("user", size)]) for _ in range(sessions)]
        return Traffic([[] for _ in range(connections)], [requests] * connections, shared=True)
    dialogues = [_dialogue(writer, pattern.content.size, turns) for _ in range(sessions)]
    # Each session stays on one connection, so that a turn is sent only after the previous one was answered.
    owned = [dialogues[index::connections] for index in range(connections)]
    return Traffic(
        [[dialogue[0] for dialogue in mine] for mine in owned],
        [[dialogue[turn] for turn in range(1, turns + 1) for dialogue in mine] for mine in owned],
        shared=False,
    )


def _dialogue(writer: _Writer, size: int, turns: int) -> list[bytes]:
    """The requests of a session. The middle one has about `size` bytes; each turn adds about 400 bytes."""
    messages = [writer.system]
    roles = itertools.cycle(("user", "assistant"))
    while len(messages) % 2 == 0 or len(writer.request(messages)) < size - turns * 250 - 700:
        messages.append(writer.message(next(roles), 150 + size // 40))
    requests = []
    for _ in range(turns + 1):
        messages.append(writer.message("user", 40))
        requests.append(writer.request(messages))
        messages.append(writer.message("assistant", 20))
    return requests
