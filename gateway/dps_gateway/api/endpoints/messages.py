"""POST /v1/messages, Anthropic's Messages API."""

from typing import Any, Final

from dps_gateway.api.endpoints.route import Route
from dps_gateway.engine.anthropic import ANTHROPIC_ANSWERS
from dps_gateway.engine.stream_content import MESSAGE_STREAMS
from dps_gateway.prompt.accounting import Accountant, Prompt


def _prompts(accountant: Accountant, body: dict[str, Any]) -> list[Prompt]:
    return [accountant.messages(body)]


# SGLang 0.5.23 has neither cache_salt nor extra_key in these requests.
ROUTE: Final = Route(
    "/v1/messages", "chat", ANTHROPIC_ANSWERS, _prompts, salted=(), stream_content=MESSAGE_STREAMS
)
