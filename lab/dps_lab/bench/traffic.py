"""What is sent in one cell of the benchmark: whole requests, built before the clock starts."""

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
"""Timed turns of a growing session, after a first one that is not."""

_SYSTEM: Final = "You are a careful assistant of an operations team. Answer briefly, with the tools you have."

Sessions = Literal["distinct", "growing"]
Count = Callable[[str], int]
"""Tokens of a text, special tokens in it recognised."""


@dataclass(frozen=True)
class Content:
    """What a request carries: its body's size in bytes, and how sessions behave.

    `distinct`: every request is the first turn of a session with its own content. `growing`: every request is
    a later turn, which repeats its session's history and appends an answer and a new question.
    """

    size: int
    sessions: Sessions

    def __str__(self) -> str:
        return f"{self.size // 1024} KB, {self.sessions} sessions"


@dataclass(frozen=True)
class Cell:
    """One kind of traffic: the shape of the answer, and the request's content."""

    stream: bool
    content: Content

    def __str__(self) -> str:
        return f"{'32-chunk stream' if self.stream else 'unary'}, {self.content}"


@dataclass(frozen=True)
class Traffic:
    """Requests by connection: the `warm` ones are sent before the clock starts, so that histories exist.

    Where all connections have the same iterator, whichever is free takes the next request.
    """

    warm: list[list[bytes]]
    timed: list[list[bytes]]
    shared: bool

    def sequences(self) -> list[Iterator[bytes]]:
        """The timed requests, anew for every contender."""
        if self.shared:
            return [iter(self.timed[0])] * len(self.timed)
        return [iter(mine) for mine in self.timed]


@dataclass(frozen=True)
class _Message:
    role: str
    content: str
    tokens: int


class _Writer:
    """Writes requests as an unmodified OpenAI client sends them: no session id, and `seed`.

    The seed is the prompt's true length in tokens, so that the fake engine can report it as usage without a
    tokenizer. Lengths are added up by message, rendered as ChatML: tokens never merge across <|im_start|>.
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
            "max_tokens": 64,
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


def traffic(cell: Cell, seed: str, sessions: int, connections: int, count: Count) -> Traffic:
    """The requests of one cell. The same seed gives the same bytes; different seeds share no session."""
    writer = _Writer(Random(f"{cell} {seed}"), cell.stream, count)
    if cell.content.sessions == "distinct":
        size = cell.content.size - 400
        opened = [writer.request([writer.system, writer.message("user", size)]) for _ in range(sessions)]
        return Traffic([[] for _ in range(connections)], [opened] * connections, shared=True)
    dialogues = [_dialogue(writer, cell.content.size) for _ in range(sessions)]
    # A connection keeps its sessions: a turn is sent only after the one before it was answered.
    owned = [dialogues[index::connections] for index in range(connections)]
    return Traffic(
        [[dialogue[0] for dialogue in mine] for mine in owned],
        [[dialogue[turn] for turn in range(1, TURNS + 1) for dialogue in mine] for mine in owned],
        shared=False,
    )


def _dialogue(writer: _Writer, size: int) -> list[bytes]:
    """A session's turns as requests: about `size` bytes in the middle one, some 400 more a turn."""
    messages = [writer.system]
    roles = itertools.cycle(("user", "assistant"))
    while len(messages) % 2 == 0 or len(writer.request(messages)) < size - TURNS * 250 - 700:
        messages.append(writer.message(next(roles), 150 + size // 40))
    requests = []
    for _ in range(TURNS + 1):
        messages.append(writer.message("user", 40))
        requests.append(writer.request(messages))
        messages.append(writer.message("assistant", 20))
    return requests
