"""What separates KV caches beyond the rendered prompt: model, adapter, cache salt, media. Pure.

An engine reuses cached prefixes only between requests that agree in all of these, so the digests of prompts include
them. SGLang 0.5: `extra_key` in `RadixKey` (built from the salt and the adapter), and media by their content.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson
import xxhash

_CACHE_FIELDS: Final = (
    "model", "lora_path", "cache_salt", "extra_key", "image_data", "video_data", "audio_data",
)  # fmt: skip


def cache_key(body: Mapping[str, Any]) -> bytes:
    """A digest of the request fields that select a KV cache for the whole prompt."""
    return _digest([body.get(name) for name in _CACHE_FIELDS])


def media_key(part: Any) -> bytes:
    """A digest of a content part with an image, video or audio."""
    return _digest(part)


def _digest(value: Any) -> bytes:
    try:
        return xxhash.xxh3_128_digest(orjson.dumps(value))
    except orjson.JSONEncodeError:  # nested too deeply; the engine will refuse it
        return b""
