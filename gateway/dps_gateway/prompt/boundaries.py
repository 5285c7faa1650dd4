"""Boundaries at which a rendered prompt can be split, and digests of its prefixes. This module performs no I/O.

A *boundary* is the offset at which a message starts with a special token that the tokenizer always splits off.
Tokenization is additive at a boundary: the text before it yields the same tokens whatever follows, so they are counted
only once.
"""

from base64 import urlsafe_b64encode
from collections.abc import Sequence
from typing import Final

import xxhash

MAX_LOOKUPS: Final = 16
"""The maximum number of boundaries, counted from the end of a prompt, that are looked up to identify its session."""

MAX_GENERATION_PROMPT_BYTES: Final = 256
"""The maximum length of text after the last boundary that is treated as a generation prompt."""

ANCHOR_BYTES: Final = 256
"""The distance of anchors, in bytes. A prompt without a message boundary at its end is looked up at its anchors."""

MAX_ANCHORS: Final = 64
"""The maximum number of anchors, counted from the end of a prompt, that are looked up: 16 KiB of growth."""

Mark = tuple[int, bytes]
"""An offset in a prompt (bytes), and a digest that is hashed into the digest of every longer prefix. It identifies
content, such as an image, that is absent from the rendered text but affects the engine's KV cache."""


class Prefixes:
    """Digests of the prefixes of one prompt.

    If digests are requested in ascending order of offset, every byte is hashed only once. `marks` are in ascending
    order of their offsets.
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
        """Hash the bytes from `start` to `end`, and each mark immediately before the byte at its offset."""
        for offset, mark in self._marks:
            if start <= offset < end:
                digest.update(self._view[start:offset])
                digest.update(mark)
                start = offset
        digest.update(self._view[start:end])


def last_boundaries(data: bytes, split_token: bytes | None) -> list[int]:
    """The offsets of the last MAX_LOOKUPS occurrences of `split_token` in ascending order, except at the start.

    They are searched from the end, because searching the whole of a long prompt takes as long as hashing it.
    """
    if not split_token:
        return []
    offsets: list[int] = []
    at = data.rfind(split_token, 1)
    while at != -1 and len(offsets) < MAX_LOOKUPS:
        offsets.append(at)
        at = data.rfind(split_token, 1, at)
    return offsets[::-1]


def committed_offset(size: int, boundaries: list[int]) -> int:
    """The length of the prefix of a prompt of `size` bytes that later prompts are compared with.

    It ends at the last boundary if only a generation prompt follows; otherwise (raw text) it is the whole prompt.
    """
    if boundaries and size - boundaries[-1] <= MAX_GENERATION_PROMPT_BYTES:
        return boundaries[-1]
    return size


def anchors(size: int) -> list[int]:
    """The last multiples of ANCHOR_BYTES in a prompt of `size` bytes, in ascending order.

    Raw text has no boundaries, and the length of the previous prompt is unknown before its record is found. A pointer
    is therefore stored for the last anchor of a prompt, which is also an anchor of every prompt that continues it.
    """
    last = size // ANCHOR_BYTES
    return [number * ANCHOR_BYTES for number in range(max(1, last - MAX_ANCHORS + 1), last + 1)]


def system_offset(data: bytes, split_token: bytes | None) -> int:
    """The end of the system prompt and tools, which many conversations share; 0 if there are none, or it is unknown."""
    return max(0, data.find(split_token + b"user")) if split_token else 0


def opening_offset(data: bytes, split_token: bytes | None) -> int:
    """The end of the first user message: the shortest prefix that distinguishes most conversations.

    It is the same for all turns of a conversation. If the chat template does not write the user's role after
    `split_token`, the first boundary is returned; without boundaries, the first anchor, or the end of a shorter prompt.
    """
    first = data.find(split_token, 1) if split_token else -1
    if not split_token or first == -1:
        return min(ANCHOR_BYTES, len(data))
    first_user = data.find(split_token + b"user")
    following = data.find(split_token, first_user + 1) if first_user != -1 else -1
    return first if following == -1 else following
