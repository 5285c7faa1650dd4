"""What a prompt has in common with earlier ones: boundaries, digests of its prefixes, and the first difference.

A *boundary* is the offset at which a message starts with a special token that the tokenizer always splits off.
Tokenization is additive at a boundary: the text before it yields the same tokens whatever follows, so they are counted
only once.

A KV cache also depends on the model, the LoRA adapter, the cache salt and media. An engine reuses a cached prefix only
between requests that agree in all of them, so the digests include them. In SGLang 0.5, the cache salt and the adapter
are part of `RadixKey.extra_key`, and media are identified by a hash of their content. This module performs no I/O.
"""

import hashlib
import re
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import xxhash

MAX_LOOKUPS: Final = 16
"""The maximum number of boundaries, counted from the end of a prompt, that are looked up to identify its session."""

MAX_GENERATION_PROMPT_BYTES: Final = 256
"""The maximum length of text after the last boundary that is treated as a generation prompt."""

ANCHOR_BYTES: Final = 256
"""The distance of anchors, in bytes. A prompt without a message boundary at its end is looked up at its anchors."""

MAX_ANCHORS: Final = 64
"""The maximum number of anchors, counted from the end of a prompt, that are looked up: 16 KiB of growth."""

MAX_MESSAGES: Final = 16
"""The number of messages, from the first, that have a fingerprint."""

_FINGERPRINT_CHARS: Final = 4

_ROLE: Final = re.compile(rb"(system|developer|user|assistant|model|tool|ipython)\b")
"""The roles that chat templates write at the start of a message. Anything else could be a part of its content."""

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


@dataclass(frozen=True, slots=True)
class Difference:
    """The first message that differs."""

    message: int
    """Its index in the rendered prompt, which may have messages that the request has not. MAX_MESSAGES stands for this
    and all later messages."""
    role: str | None
    """None if it is unknown."""
    byte: int
    """The offset at which it begins in the new prompt."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The beginnings of the first messages of a prompt."""

    data: bytes
    """The rendered prompt."""
    split_token: bytes
    """The special token with which each message begins; empty if there is none."""
    starts: Sequence[int]
    """The offsets of at most MAX_MESSAGES + 1 messages, in bytes."""
    fingerprints: str
    """A few characters for each message except the last, from the digest of the prompt up to the message's end."""

    @classmethod
    def of(cls, data: bytes, marks: Sequence[Mark], split_token: bytes | None) -> "Outline":
        """The outline of a rendered prompt, in which `split_token` begins each message. Without it, it is empty."""
        starts: list[int] = []
        at = data.find(split_token) if split_token else -1
        while split_token and at != -1 and len(starts) <= MAX_MESSAGES:
            starts.append(at)
            at = data.find(split_token, at + 1)
        # Not the prompt's own digests: those of earlier prefixes than the last one are hashed from the start.
        prefixes = Prefixes(data, marks)
        digests = [prefixes.digest(end) or "" for end in starts[1:]]
        fingerprints = "".join(digest[:_FINGERPRINT_CHARS] for digest in digests)
        return cls(data, split_token or b"", starts, fingerprints)

    def difference(self, recorded: str) -> Difference | None:
        """The first message that differs from those with the `recorded` fingerprints; None if it is unknown."""
        if not recorded or not self.starts:
            return None
        pairs = zip(_split(recorded), _split(self.fingerprints), strict=False)
        same = 0
        for before, now in pairs:
            if before != now:
                break
            same += 1
        start = self.starts[same]
        role = _ROLE.match(self.data, start + len(self.split_token)) if same < MAX_MESSAGES else None
        return Difference(same, role[1].decode() if role else None, start)


def _split(fingerprints: str) -> list[str]:
    return [
        fingerprints[start : start + _FINGERPRINT_CHARS]
        for start in range(0, len(fingerprints), _FINGERPRINT_CHARS)
    ]


def cache_key(body: Mapping[str, Any], fields: Iterable[str]) -> bytes:
    """A digest of the request fields that select a KV cache for the whole prompt (`SGLang.cache_fields`)."""
    return content_digest([body.get(name) for name in fields])


@dataclass(frozen=True, slots=True)
class CacheSalt:
    """The cache salts of one tenant's requests: keyed digests, which other tenants can neither choose nor compute.

    secret: the key of the digests, at most 64 bytes.
    """

    secret: bytes

    def of(self, own: str | None) -> str:
        """The salt that replaces the client's, if it sent one. Requests of the tenant with equal salts share cached
        prefixes."""
        return hashlib.blake2b((own or "").encode(), key=self.secret, digest_size=16).hexdigest()

    @property
    def mark(self) -> bytes:
        """A digest of the tenant's cache, for prompts (`Prompt.in_cache`)."""
        return content_digest(self.of(None))


def content_digest(value: Any) -> bytes:
    """A digest of a JSON value, such as a content part with an image, video or audio."""
    try:
        return xxhash.xxh3_128_digest(orjson.dumps(value))
    except orjson.JSONEncodeError:  # nested too deeply; the engine will refuse it
        return b""
