"""POST /v1/responses, OpenAI's Responses API."""

from typing import Any, Final

import orjson

from dps_gateway.api.endpoints.base import Endpoint
from dps_gateway.api.errors import BadRequest
from dps_gateway.engine.usage import Usage, text_or_none, token_count
from dps_gateway.prompt.renderer import Prompt, PromptRenderer


class _Responses(Endpoint):
    """A stream reports usage in its last event, which contains the whole response. Its first event contains the
    response's id."""

    path = "/v1/responses"
    operation = "chat"
    stores = True
    closing = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
    usage_markers = (b'"output_tokens"', b'response.created"')

    def prompts(self, renderer: PromptRenderer, body: dict[str, Any]) -> list[Prompt]:
        if body.get("request_id") is not None:
            # SGLang uses this field as the response's id. The id of another tenant's response would overwrite that
            # response.
            raise BadRequest("request_id must not be set: the engine assigns the ids of responses")
        return [renderer.responses(body)]

    def usage_of(self, document: Any) -> Usage | None:
        if not isinstance(document, dict):
            return None
        response = document.get("response", document)
        if not isinstance(response, dict) or response.get("object") != "response":
            return None
        usage = response.get("usage")
        if not isinstance(usage, dict):
            usage = {}
        details = usage.get("input_tokens_details")
        cached = token_count(details.get("cached_tokens")) if isinstance(details, dict) else None
        return Usage(
            prompt_tokens=token_count(usage.get("input_tokens")) or 0,
            completion_tokens=token_count(usage.get("output_tokens")) or 0,
            # SGLang also reports 0 if it is not configured to report cached tokens.
            cached_tokens=cached or None,
            finish_reason=text_or_none(response.get("status")),
            response_id=text_or_none(response.get("id")),
            model=text_or_none(response.get("model")),
        )

    def error_event(self, error: bytes) -> bytes:
        content = orjson.loads(error)["error"]
        fields = {"type": "error", **{name: content.get(name) for name in ("code", "message", "param")}}
        # OpenAI's SDKs raise an exception for an event that has an error object.
        return b"event: error\ndata: " + orjson.dumps(fields | {"error": content}) + b"\n\n"


RESPONSES: Final = _Responses()
