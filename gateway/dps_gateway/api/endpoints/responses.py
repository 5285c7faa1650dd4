"""POST /v1/responses, OpenAI's Responses API."""

from typing import Any, Final

from dps_gateway.api.endpoints.route import Route
from dps_gateway.api.errors import BadRequest
from dps_gateway.engine.openai import RESPONSES_ANSWERS
from dps_gateway.prompt.accounting import Accountant, Prompt


def _prompts(accountant: Accountant, body: dict[str, Any]) -> list[Prompt]:
    if body.get("request_id") is not None:
        # SGLang uses this field as the response's id. The id of another tenant's response would overwrite that
        # response.
        raise BadRequest("request_id must not be set: the engine assigns the ids of responses")
    return [accountant.responses(body)]


ROUTE: Final = Route("/v1/responses", "chat", RESPONSES_ANSWERS, _prompts, stores=True)
