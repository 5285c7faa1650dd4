"""Where a rendered prompt may be cut, and digests of what lies before a cut. Pure.

Tokenization is additive at a *boundary*: the start of a special token that the tokenizer always splits off. What
precedes it is tokenized the same whatever follows, so tokens before it need counting only once.
"""

from base64 import urlsafe_b64encode
from typing import Final

import xxhash

MAX_LOOKUPS: Final = 16
"""Message boundaries of a prompt that are looked up to recognise a session by its history."""

MAX_GENERATION_PROMPT_BYTES: Final = 256
"""What may follow the last boundary of a prompt that ends in a generation prompt."""


class Prefixes:
    """Digests of the prefixes of one prompt, each byte hashed once for ascending offsets."""

    def __init__(self, data: bytes) -> None:
        self._view = memoryview(data)
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
                self._hash.update(self._view[self._hashed : offset])
                self._hashed = offset
                raw = self._hash.digest()
            else:
                raw = xxhash.xxh3_128_digest(self._view[:offset])
            digest = self._known[offset] = urlsafe_b64encode(raw)[:22].decode()
        return digest


def message_boundaries(data: bytes, message_start: bytes | None) -> list[int]:
    """The offsets at which messages start, ascending, the start of the prompt left out."""
    if not message_start:
        return []
    offsets = []
    at = data.find(message_start, 1)
    while at != -1:
        offsets.append(at)
        at = data.find(message_start, at + len(message_start))
    return offsets


def committed_offset(size: int, boundaries: list[int]) -> int:
    """Up to where a prompt of `size` bytes is compared with later ones.

    The last boundary, when only a generation prompt follows it; otherwise (raw text) the whole prompt.
    """
    if boundaries and size - boundaries[-1] <= MAX_GENERATION_PROMPT_BYTES:
        return boundaries[-1]
    return size
