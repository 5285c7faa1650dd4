"""Lets a header carry the cache salt of requests that have no field for it, such as those to /v1/messages.

SGLang 0.5.23 converts a request of Anthropic's Messages API to a chat request, which has the field `cache_salt`, but
has no way to set it. The gateway sets the header, and never forwards a client's own.
"""

from collections.abc import Callable
from typing import Any

SALT_HEADER = "x-dps-cache-salt"


def salted(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
    """Wraps `OpenAIServingChat._convert_to_internal_request`: a chat without a salt gets that of the header."""
    if request.cache_salt is None and raw_request is not None:
        request.cache_salt = raw_request.headers.get(SALT_HEADER)
    return original(self, request, raw_request)
