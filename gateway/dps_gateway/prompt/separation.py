"""What separates KV caches beyond the rendered prompt: model, adapter, cache salt, media. Pure.

An engine reuses cached prefixes only between requests that agree in all of these, so the digests of prompts include
them. SGLang 0.5: `extra_key` in `RadixKey` (built from the salt and the adapter), and media by their content.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import xxhash


def cache_key(body: Mapping[str, Any], fields: Iterable[str]) -> bytes:
    """A digest of the request fields that select a KV cache for the whole prompt (`EngineDialect.cache_fields`)."""
    return _digest([body.get(name) for name in fields])


def media_key(part: Any) -> bytes:
    """A digest of a content part with an image, video or audio."""
    return _digest(part)


def _digest(value: Any) -> bytes:
    try:
        return xxhash.xxh3_128_digest(orjson.dumps(value))
    except orjson.JSONEncodeError:  # nested too deeply; the engine will refuse it
        return b""
