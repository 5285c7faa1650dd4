"""POST /v1/completions."""

from typing import Any, Final

from dps_gateway.api.endpoints.route import Route, text_prompts
from dps_gateway.engine.openai import OPENAI_ANSWERS
from dps_gateway.engine.stream_content import COMPLETION_STREAMS
from dps_gateway.prompt.accounting import Accountant, Prompt


def _prompts(accountant: Accountant, body: dict[str, Any]) -> list[Prompt]:
    return text_prompts(accountant, body.get("prompt"))


ROUTE: Final = Route(
    "/v1/completions", "text_completion", OPENAI_ANSWERS, _prompts, stream_content=COMPLETION_STREAMS
)
