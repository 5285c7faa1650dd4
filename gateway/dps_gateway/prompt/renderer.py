"""The prompt of a request: rendered as the engine renders it, compared with history, counted incrementally."""

import asyncio
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from dps_gateway.prompt import messages, responses
from dps_gateway.prompt.chat import ChatInput, chat_input, content_format
from dps_gateway.prompt.prefixes import (
    ANCHOR_BYTES,
    Mark,
    Outline,
    Prefixes,
    anchors,
    committed_offset,
    last_boundaries,
    opening_offset,
    system_offset,
)
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.session.record import Point

LONG_TEXT_BYTES: Final = 128 * 1024
"""Texts of this size take milliseconds to tokenize, so they are counted in a thread."""

_TOKEN_ID_BYTES: Final = 4

_HARMONY: Final = "<|channel|>"
"""A token of the harmony format (gpt-oss), which the chat templates of other models do not contain."""

_STORED_ANSWER: Final = "\x00stored answer\x00"
_STORED: Final = ({"role": "user", "content": "q"}, {"role": "assistant", "content": _STORED_ANSWER})
"""Placeholder for a conversation that only the engine has stored."""

_SENTINEL: Final = re.compile("(\x00media [0-9]+\x00)")
"""Marks the start of a message with media."""


class Uncountable(Exception):
    """The prompt's length cannot be determined: the engine will refuse it, it is several prompts, or it is too long.

    The message contains no part of the request. The exception that caused it may, so only its type is stated.
    """


@dataclass(frozen=True)
class Prompt:
    """One rendered prompt. Offsets are in bytes, counts in tokens."""

    data: bytes
    boundaries: list[int]
    count_from: Callable[[int], int]
    """A function that counts the tokens from an offset (0 or a boundary) to the end of the prompt."""
    root: int
    """The end of the prefix that distinguishes conversations. It is the same for all turns of a conversation."""
    marks: tuple[Mark, ...] = ()
    """Digests of the inputs, other than `data`, on which the engine's KV cache depends."""
    system: int = 0
    """The end of the system prompt and tools; 0 if there are none."""
    split_token: bytes | None = None
    """The special token with which each message begins."""

    @cached_property
    def prefixes(self) -> Prefixes:
        """The digests of the prompt's prefixes."""
        return Prefixes(self.data, self.marks)

    @cached_property
    def outline(self) -> Outline:
        """What tells where a later prompt that does not begin with this one differs."""
        return Outline.of(self.data, self.marks, self.split_token)

    def in_cache(self, key: bytes) -> "Prompt":
        """This prompt with digests that are specific to the KV cache selected by `key`."""
        return replace(self, marks=((0, key), *self.marks))

    def continuing(self, tokens: int) -> "Prompt":
        """This prompt, preceded by a conversation of `tokens` tokens that only the engine has stored."""
        return replace(self, count_from=lambda offset: tokens + self.count_from(offset))

    @cached_property
    def offset(self) -> int:
        """The length of the prefix that later prompts are compared with."""
        return committed_offset(len(self.data), self.boundaries)

    @property
    def digest(self) -> str:
        """The digest of the prefix that later prompts are compared with."""
        return self.digest_of(self.offset)

    def digest_of(self, offset: int) -> str:
        """The digest of the prefix that ends at an offset."""
        digest = self.prefixes.digest(offset)
        assert digest is not None
        return digest

    @property
    def pointer_digest(self) -> str | None:
        """The digest by which later prompts look this one up, or None if the prompt is too short for an anchor."""
        if self.ends_at_boundary:
            return self.digest
        last = anchors(len(self.data))[-1:]
        return self.prefixes.digest(last[0]) if last else None

    @property
    def ends_at_boundary(self) -> bool:
        """Whether the compared prefix ends at a boundary, so that no token merges across its end."""
        return bool(self.boundaries) and self.offset == self.boundaries[-1]

    def starts_with(self, point: Point) -> bool:
        """Whether a recorded point is a prefix of this prompt."""
        return self.prefixes.digest(point.offset) == point.digest

    def lookups(self) -> list[str]:
        """The digests by which an earlier prompt of the session may be found, longest prefix first."""
        recent = self.boundaries
        if not self.ends_at_boundary:
            recent = sorted({*recent, *anchors(len(self.data))})
        digests = [digest for offset in recent if (digest := self.prefixes.digest(offset)) is not None]
        return digests[::-1]

    def count(self, base: Point | None) -> tuple[int, int]:
        """Returns the prompt's length, and its length up to `offset` (0 if unknown).

        Only the text after `base` is tokenized.
        """
        start, counted = (base.offset, base.tokens) if base is not None and base.tokens else (0, 0)
        length = counted + self.count_from(start)
        if not self.ends_at_boundary:
            return length, 0
        return length, length - self.count_from(self.offset)

    async def measure(self, base: Point | None) -> tuple[int, int]:
        """Like `count`, but long texts are tokenized in a thread."""
        start = base.offset if base is not None and base.tokens else 0
        if len(self.data) - start < LONG_TEXT_BYTES:
            return self.count(base)
        return await asyncio.to_thread(self.count, base)


async def total_tokens(prompts: list[Prompt]) -> int:
    """The sum of the lengths of several prompts. If they are long, they are tokenized in a thread."""
    if sum(len(prompt.data) for prompt in prompts) < LONG_TEXT_BYTES:
        return _total(prompts)
    return await asyncio.to_thread(_total, prompts)


def _total(prompts: list[Prompt]) -> int:
    return sum(prompt.count(None)[0] for prompt in prompts)


class PromptRenderer:
    """Renders requests to prompts, as the engine would."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template or ""
        self._format = content_format(template)
        self._inline_system = messages.renders_inline_system(template)
        self._reasoning = "</think>" in template
        """Whether the engine is taken to have a reasoning parser (--reasoning-parser)."""
        self._harmony = _HARMONY in template

    def chat(self, body: dict[str, Any]) -> Prompt:
        """The prompt of a /v1/chat/completions request. Raises Uncountable."""
        if isinstance(ids := body.get("input_ids"), list):
            return self._ids(ids)
        try:
            chat = chat_input(body, self._format)
            text = self._tokenizer.render(chat.messages, chat.tools, chat.variables)
            marks = self._media_marks(text, chat)
        except Exception as error:  # a template may raise anything for messages that it does not accept
            raise Uncountable(f"the chat template refuses the request ({type(error).__name__})") from error
        # The engine tokenizes the continuation separately, so no token merges across its beginning.
        extra = self._tokenizer.count(chat.continuation) if chat.continuation else 0
        return self._text(text, added_tokens=extra, marks=marks)

    async def answer_tokens(self, text: str) -> int:
        """The number of tokens in a part of an answer. Long texts are tokenized in a thread."""
        if len(text) < LONG_TEXT_BYTES:
            return self._tokenizer.count(text)
        return await asyncio.to_thread(self._tokenizer.count, text)

    def messages(self, body: dict[str, Any]) -> Prompt:
        """The prompt of a /v1/messages request. Raises Uncountable."""
        return self.chat(self._converted(messages.chat_request, body, reasoning=self._reasoning))

    def responses(self, body: dict[str, Any]) -> Prompt:
        """The prompt of a /v1/responses request. Raises Uncountable.

        If the request continues a stored response, this is the text after the stored answer, preceded by the response's
        id instead of the conversation, which only the engine has stored (see `Prompt.continuing`).
        """
        previous = body.get("previous_response_id")
        if previous is None and self._harmony:  # SGLang does not use the chat template for such a request
            raise Uncountable("requests to models with the harmony format cannot be counted")
        if previous is None:
            return self.chat(self._converted(responses.chat_request, body))
        if not isinstance(previous, str):
            raise Uncountable("the engine will refuse the request: previous_response_id is not a string")
        items = body.get("input")
        added = items if isinstance(items, list) else [{"role": "user", "content": items}]
        text = self.responses({"input": [*_STORED, *added]}).data.decode().partition(_STORED_ANSWER)[2]
        data = f"{previous}\n{text}".encode(errors="replace")
        return Prompt(data, [], lambda offset: self._tokenizer.count(text), len(data))

    def _converted(
        self, convert: Callable[..., dict[str, Any]], body: dict[str, Any], **rules: bool
    ) -> dict[str, Any]:
        """The chat request to which the engine converts a request of another API. Raises Uncountable."""
        try:
            return convert(body, inline_system=self._inline_system, **rules)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Uncountable(
                f"the request cannot be converted to a chat ({type(error).__name__})"
            ) from error

    def text(self, prompt: Any) -> Prompt:
        """The prompt of /v1/completions or /generate: a string or a list of token ids. Raises Uncountable."""
        if isinstance(prompt, str):
            return self._text(prompt, added_tokens=self._tokenizer.added_tokens)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            return self.text(prompt[0])
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return self._ids(prompt)
        raise Uncountable("not a single prompt")

    def _text(self, text: str, added_tokens: int, marks: tuple[Mark, ...] = ()) -> Prompt:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise Uncountable("the prompt is not valid Unicode") from error
        split_token = self._tokenizer.split_token
        boundaries = last_boundaries(data, split_token)
        count = self._tokenizer.count

        def count_from(offset: int) -> int:
            rest = text if offset == 0 else data[offset:].decode()
            return count(rest) + added_tokens

        root, system = opening_offset(data, split_token), system_offset(data, split_token)
        return Prompt(data, boundaries, count_from, root, marks, system, split_token)

    def _media_marks(self, text: str, chat: ChatInput) -> tuple[Mark, ...]:
        """The positions and digests of the chat's media. The rendered text has equal placeholders for them, or none.

        The chat is rendered again with a sentinel at the start of every message with media. If removing the sentinels
        does not restore `text`, all media are treated as being at the start of the prompt. Media in a message that the
        template does not render are at its end.
        """
        if not chat.media:
            return ()
        messages = list(chat.messages)
        sentinels = [f"\x00media {number}\x00" for number in range(len(chat.media))]
        for sentinel, (index, _) in zip(sentinels, chat.media, strict=True):
            messages[index] = _prefixed(messages[index], sentinel)
        parts = _SENTINEL.split(self._tokenizer.render(messages, chat.tools, chat.variables))
        found: dict[str, int] = {}
        offset = 0
        for before, sentinel in zip(parts[::2], parts[1::2], strict=False):
            offset += len(before.encode())
            found.setdefault(sentinel, offset)
        if "".join(parts[::2]) == text:
            not_rendered = len(text.encode())
            offsets = [found.get(sentinel, not_rendered) for sentinel in sentinels]
        else:
            offsets = [0] * len(sentinels)
        return tuple(sorted((offset, key) for offset, (_, key) in zip(offsets, chat.media, strict=True)))

    def _ids(self, ids: list[Any]) -> Prompt:
        try:
            data = array("I", ids).tobytes()
        except (OverflowError, TypeError) as error:
            raise Uncountable("token ids are not integers") from error
        root = min(ANCHOR_BYTES, len(data))
        return Prompt(data, [], lambda offset: (len(data) - offset) // _TOKEN_ID_BYTES, root)


def _prefixed(message: dict[str, Any], text: str) -> dict[str, Any]:
    """A message of the chat template's input with `text` before its content."""
    content = message["content"]
    if isinstance(content, str):
        return message | {"content": text + content}
    return message | {"content": [{"type": "text", "text": text}, *content]}
