"""Lets a header carry the cache salt of requests that have no field for it: those to /v1/messages and /v1/score.

SGLang 0.5.23 converts them to the request of its own /generate, whose field `cache_salt` a client cannot set. The
gateway sets the header, and never forwards a client's own.
"""

import os
from collections.abc import Callable
from typing import Any

SALT_HEADER = "x-dps-cache-salt"

ANNOUNCEMENT = "dps_cache_salt_header"
"""The key in /server_info whose value is the name of the header."""

RUST_SERVER = "SGLANG_RUST_SERVER"
"""The variable that selects SGLang's server in Rust."""


def salted(original: Callable[..., Any], self: Any, obj: Any, request: Any = None) -> Any:
    """Wraps `TokenizerManager.generate_request`: a prompt without a salt gets that of the header.

    Requests for embeddings have no salt, because SGLang does not cache their prompts.
    """
    headers = getattr(request, "headers", None)
    if headers is not None and getattr(obj, "cache_salt", "") is None:
        obj.cache_salt = headers.get(SALT_HEADER)
    return original(self, obj, request)


def announced(original: Callable[..., Any], self: Any) -> dict[str, Any]:
    """Wraps `ServerArgs.resolved_dict`: /server_info reports the header that is read.

    SGLang loads no plugins in additional workers that serve HTTP, so these do not read it, nor does its server in Rust.
    """
    resolved: dict[str, Any] = original(self)
    if resolved.get("tokenizer_worker_num") == 1 and os.environ.get(RUST_SERVER, "").lower() in (
        "",
        "0",
        "false",
    ):
        resolved[ANNOUNCEMENT] = SALT_HEADER
    return resolved
