"""POST /v1/messages, Anthropic's Messages API."""

from typing import Any, Final

import orjson

from dps_gateway.api.endpoints.base import Endpoint
from dps_gateway.api.outcome import ANTHROPIC_ERROR_TYPES
from dps_gateway.engine.usage import Usage, text_or_none, token_count
from dps_gateway.prompt.renderer import Prompt, PromptRenderer

_PROMPT_FIELDS: Final = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class _Messages(Endpoint):
    """A stream reports the prompt's tokens in its first event (`message_start`) and the completion's in the last but
    one (`message_delta`). `input_tokens` excludes the cached tokens.

    An error object is `{"type": "error", "error": {"type": ..., "message": ...}}`.
    """

    path = "/v1/messages"
    operation = "chat"
    salted = ()  # SGLang 0.5.23 has neither cache_salt nor extra_key in these requests
    closing = (b"event: message_stop",)
    heartbeat = b'event: ping\ndata: {"type": "ping"}\n\n'
    usage_markers = (b'"output_tokens"', b'"input_tokens"')

    def prompts(self, renderer: PromptRenderer, body: dict[str, Any]) -> list[Prompt]:
        return [renderer.messages(body)]

    def usage_of(self, document: Any) -> Usage | None:
        if not isinstance(document, dict):
            return None
        message = document.get("message", document)
        usage = message.get("usage") if isinstance(message, dict) else None
        if not isinstance(usage, dict):
            return None
        delta = document.get("delta")
        ending = delta if isinstance(delta, dict) else message
        return Usage(
            prompt_tokens=sum(token_count(usage.get(name)) or 0 for name in _PROMPT_FIELDS),
            completion_tokens=token_count(usage.get("output_tokens")) or 0,
            cached_tokens=token_count(usage.get("cache_read_input_tokens")),
            finish_reason=text_or_none(ending.get("stop_reason")),
            response_id=text_or_none(message.get("id")),
            model=text_or_none(message.get("model")),
        )

    def error(self, status: int, kind: str, code: str, message: str) -> bytes:
        error = {"type": ANTHROPIC_ERROR_TYPES.get(status, "api_error"), "message": message}
        return orjson.dumps({"type": "error", "error": error})

    def error_of_engine(self, status: int, content: bytes) -> bytes:
        document = orjson.loads(super().error_of_engine(status, content))
        if document.get("type") == "error":
            return content
        return self.error(status, "", "", str(document["error"]["message"]))

    def error_event(self, error: bytes) -> bytes:
        return b"event: error\ndata: " + error + b"\n\n"


MESSAGES: Final = _Messages()
