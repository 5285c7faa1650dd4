"""The requests of one traffic pattern of the benchmark, built before the measurement starts."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pydoc_data.topics import topics
from random import Random
from typing import Final, Literal

MODEL: Final = "Qwen/Qwen2.5-7B-Instruct"
PATH: Final = "/v1/chat/completions"
TURNS: Final = 8
"""Timed turns of a growing session. Its first turn is not timed."""

_SYSTEM: Final = "You are a careful assistant of an operations team. Answer briefly, with the tools you have."

Count = Callable[[str], int]
"""Counts the tokens of a text, recognising special tokens in it."""


@dataclass(frozen=True)
class TrafficPattern:
    """One kind of traffic: streaming or not, the size of the bodies in bytes, and the kind of sessions.

    distinct: every request is the first turn of a session with unique content.
    growing: every request is a later turn, which repeats the session's history and appends an answer and a new
    question.
    """

    stream: bool
    size: int
    sessions: Literal["distinct", "growing"]

    def __str__(self) -> str:
        return f"{'stream' if self.stream else 'JSON'}, {self.size // 1024} KB, {self.sessions}"


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


@cache
def _words() -> list[str]:
    """The language reference behind Python's `help()`: prose and code, with a realistic vocabulary."""
    return " ".join(topics.values()).split()


def text(random: Random, size: int) -> str:
    """A text of `size` characters that is new, because tokenizers cache words and passages."""
    words = _words()
    parts = [f"Case {random.randrange(10**12)}:"]
    while sum(map(len, parts)) + len(parts) < size:
        start = random.randrange(len(words) - 6)
        parts.append(f"{' '.join(words[start : start + 6])} {random.randrange(1000)}")
    return "\n".join(parts)[:size]


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

    def __init__(self, random: Random, stream: bool, count: Count) -> None:
        self._random = random
        self._stream = stream
        self._count = count
        self._generation_prompt = count("<|im_start|>assistant\n")
        self.system = self._message("system", _SYSTEM)

    def message(self, role: str, size: int) -> _Message:
        return self._message(role, text(self._random, size))

    def request(self, messages: list[_Message]) -> bytes:
        body = {
            "model": MODEL,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "stream": self._stream,
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


def traffic(pattern: TrafficPattern, seed: str, sessions: int, connections: int, count: Count) -> Traffic:
    """The requests of one traffic pattern. They depend on `seed` only; different seeds have no session in common."""
    writer = _Writer(Random(f"{pattern} {seed}"), pattern.stream, count)
    if pattern.sessions == "distinct":
        size = pattern.size - 400
        requests = [writer.request([writer.system, writer.message("user", size)]) for _ in range(sessions)]
        return Traffic([[] for _ in range(connections)], [requests] * connections, shared=True)
    dialogues = [_dialogue(writer, pattern.size) for _ in range(sessions)]
    # Each session stays on one connection, so that a turn is sent only after the previous one was answered.
    owned = [dialogues[index::connections] for index in range(connections)]
    return Traffic(
        [[dialogue[0] for dialogue in mine] for mine in owned],
        [[dialogue[turn] for turn in range(1, TURNS + 1) for dialogue in mine] for mine in owned],
        shared=False,
    )


def _dialogue(writer: _Writer, size: int) -> list[bytes]:
    """The requests of a session. The middle one has about `size` bytes; each turn adds about 350 bytes."""
    messages = [writer.system]
    roles = itertools.cycle(("user", "assistant"))
    while len(messages) % 2 == 0 or len(writer.request(messages)) < size - TURNS * 200 - 400:
        messages.append(writer.message(next(roles), 150 + size // 40))
    requests = []
    for _ in range(TURNS + 1):
        messages.append(writer.message("user", 150))
        requests.append(writer.request(messages))
        messages.append(writer.message("assistant", 130))
    return requests
