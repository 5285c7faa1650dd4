"""Boundaries at which a rendered prompt can be split, and digests of its prefixes. Pure.

Tokenization is additive at a *boundary*, the start of a special token that the tokenizer always splits off: the text
before it yields the same tokens whatever follows, so they are counted only once.
"""

from base64 import urlsafe_b64encode
from collections.abc import Sequence
from typing import Final

import xxhash

MAX_LOOKUPS: Final = 16
"""The number of a prompt's last message boundaries that are looked up to identify a session by its history."""

MAX_GENERATION_PROMPT_BYTES: Final = 256
"""The longest text after the last boundary that is taken for a generation prompt."""

Mark = tuple[int, bytes]
"""An offset in a prompt (bytes), and a digest that all longer prefixes include. It identifies what the rendered text
does not show, but an engine's KV cache depends on, such as the content of an image."""


class Prefixes:
    """Digests of the prefixes of one prompt. For ascending offsets every byte is hashed once.

    `marks` are in ascending order of their offsets.
    """

    def __init__(self, data: bytes, marks: Sequence[Mark] = ()) -> None:
        self._view = memoryview(data)
        self._marks = marks
        self._hash = xxhash.xxh3_128()
        self._hashed = 0
        self._known: dict[int, str] = {}

    def digest(self, offset: int) -> str | None:
        """The digest of the first `offset` bytes, or None if the prompt is shorter."""
        if offset > len(self._view):
            return None
        digest = self._known.get(offset)
        if digest is None:
            if offset >= self._hashed:
                self._update(self._hash, self._hashed, offset)
                self._hashed = offset
                raw = self._hash.digest()
            else:
                fresh = xxhash.xxh3_128()
                self._update(fresh, 0, offset)
                raw = fresh.digest()
            digest = self._known[offset] = urlsafe_b64encode(raw)[:22].decode()
        return digest

    def _update(self, digest: xxhash.xxh3_128, start: int, end: int) -> None:
        """Add the bytes from `start` to `end`, each mark right before the byte at its offset."""
        for offset, mark in self._marks:
            if start <= offset < end:
                digest.update(self._view[start:offset])
                digest.update(mark)
                start = offset
        digest.update(self._view[start:end])


def message_boundaries(data: bytes, message_start: bytes | None) -> list[int]:
    """The offsets at which messages start, in ascending order, without the start of the prompt."""
    if not message_start:
        return []
    offsets = []
    at = data.find(message_start, 1)
    while at != -1:
        offsets.append(at)
        at = data.find(message_start, at + len(message_start))
    return offsets


def committed_offset(size: int, boundaries: list[int]) -> int:
    """The length of the prefix of a prompt of `size` bytes that later prompts are compared with.

    It ends at the last boundary if only a generation prompt follows; otherwise (raw text) it is the whole prompt.
    """
    if boundaries and size - boundaries[-1] <= MAX_GENERATION_PROMPT_BYTES:
        return boundaries[-1]
    return size


def opening_offset(data: bytes, boundaries: list[int], message_start: bytes | None) -> int:
    """The end of the first user message: the shortest prefix that tells most conversations apart.

    The same for all turns of a conversation. Where the chat template does not name the user's role after
    `message_start`, it is the first boundary; without boundaries it is the whole prompt.
    """
    if not boundaries or not message_start:
        return len(data)
    first_user = data.find(message_start + b"user")
    return next((offset for offset in boundaries if offset > first_user >= 0), boundaries[0])
