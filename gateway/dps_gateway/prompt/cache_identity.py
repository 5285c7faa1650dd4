"""Digests of the inputs, other than the rendered prompt, on which a KV cache depends. This module performs no I/O.

These inputs are the model, the LoRA adapter, the cache salt and media. An engine reuses a cached prefix only between
requests that agree in all of them, so the digests of prompts include them. In SGLang 0.5, the
cache salt and the adapter are part of `RadixKey.extra_key`, and media are identified by a hash of their content.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash


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
