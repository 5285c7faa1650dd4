"""A request's prompt as bytes that can be compared and counted from any boundary on."""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Protocol

from dps_gateway.prompt.boundaries import MAX_LOOKUPS, Prefixes, committed_offset, message_boundaries
from dps_gateway.prompt.chat import ChatInput, ContentFormat
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.session.record import Point

LONG_TEXT_BYTES: Final = 128 * 1024
"""From here on counting takes milliseconds, and is done in a thread."""

_TOKEN_ID_BYTES: Final = 4


class Uncountable(Exception):
    """The prompt's length cannot be known: the engine will refuse it, or it is several prompts at once."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: its bytes, where it may be cut, and how to count from a cut to its end. Offsets in bytes."""

    data: bytes
    boundaries: list[int]
    count_from: Callable[[int], int]
    """Tokens from an offset, 0 or a boundary, to the end of the prompt."""
    prefixes: Prefixes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefixes", Prefixes(self.data))

    @cached_property
    def offset(self) -> int:
        """Up to where later prompts are compared with this one."""
        return committed_offset(len(self.data), self.boundaries)

    @property
    def digest(self) -> str:
        """The digest of what later prompts are compared with."""
        digest = self.prefixes.digest(self.offset)
        assert digest is not None
        return digest

    @property
    def ends_at_boundary(self) -> bool:
        """Whether later prompts can find this one among their own boundaries."""
        return bool(self.boundaries) and self.offset == self.boundaries[-1]

    def starts_with(self, point: Point) -> bool:
        """Whether a remembered point is a prefix of this prompt."""
        return self.prefixes.digest(point.offset) == point.digest

    def lookups(self) -> list[str]:
        """The digests at the last boundaries, longest first."""
        recent = self.boundaries[-MAX_LOOKUPS:]
        digests = [digest for offset in recent if (digest := self.prefixes.digest(offset)) is not None]
        return digests[::-1]

    def count(self, base: Point | None) -> tuple[int, int]:
        """(L_t, tokens up to `offset` or 0): only what follows `base`, already counted, is tokenized."""
        start, counted = (base.offset, base.tokens) if base is not None and base.tokens else (0, 0)
        length = counted + self.count_from(start)
        if not self.ends_at_boundary:
            return length, 0
        return length, length - self.count_from(self.offset)

    async def measure(self, base: Point | None) -> tuple[int, int]:
        """As `count`, off the event loop when there is much to tokenize."""
        start = base.offset if base is not None and base.tokens else 0
        if len(self.data) - start < LONG_TEXT_BYTES:
            return self.count(base)
        return await asyncio.to_thread(self.count, base)


class ChatRules(Protocol):
    """How an engine turns a chat request into its chat template's arguments (see `engine.dialect`)."""

    def content_format(self, chat_template: str) -> ContentFormat: ...

    def chat_input(self, body: dict[str, Any], expects: ContentFormat) -> ChatInput: ...


class Accountant:
    """Turns requests into prompts, as the engine would render and tokenize them."""

    def __init__(self, tokenizer: Tokenizer, engine: ChatRules) -> None:
        self._tokenizer = tokenizer
        self._engine = engine
        self._format = engine.content_format(tokenizer.chat_template or "")

    def chat(self, body: dict[str, Any]) -> Prompt:
        """The prompt of a /v1/chat/completions request. Raises Uncountable."""
        if isinstance(ids := body.get("input_ids"), list):
            return self._ids(ids)
        try:
            chat = self._engine.chat_input(body, self._format)
            text = self._tokenizer.render(chat.messages, chat.tools, chat.variables)
        except Exception as error:  # a template may raise anything for messages that it does not accept
            raise Uncountable(f"the chat template refuses the request: {error}") from error
        if not chat.continuation:
            return self._text(text, added_tokens=0)
        # The engine tokenizes the continuation by itself, so that nothing merges across its beginning.
        extra = self._tokenizer.count(chat.continuation)
        return self._text(text, added_tokens=extra)

    def text(self, prompt: Any) -> Prompt:
        """The prompt of /v1/completions or /generate: a string or a list of token ids. Raises Uncountable."""
        if isinstance(prompt, str):
            return self._text(prompt, added_tokens=self._tokenizer.added_tokens)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            return self.text(prompt[0])
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return self._ids(prompt)
        raise Uncountable("not a single prompt")

    def _text(self, text: str, added_tokens: int) -> Prompt:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise Uncountable("the prompt is not valid Unicode") from error
        boundaries = message_boundaries(data, self._tokenizer.message_start)
        count = self._tokenizer.count

        def count_from(offset: int) -> int:
            rest = text if offset == 0 else data[offset:].decode()
            return count(rest) + added_tokens

        return Prompt(data, boundaries, count_from)

    def _ids(self, ids: list[Any]) -> Prompt:
        try:
            data = array("I", ids).tobytes()
        except (OverflowError, TypeError) as error:
            raise Uncountable("token ids are not integers") from error
        return Prompt(data, [], lambda offset: (len(data) - offset) // _TOKEN_ID_BYTES)
