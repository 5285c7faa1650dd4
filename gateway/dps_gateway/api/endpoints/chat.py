"""POST /v1/chat/completions."""

from typing import Any, Final

from dps_gateway.api.endpoints.route import Route, refuse_empty
from dps_gateway.engine.openai import OPENAI_ANSWERS
from dps_gateway.engine.stream_content import CHAT_STREAMS
from dps_gateway.prompt.accounting import Accountant, Prompt


def _prompts(accountant: Accountant, body: dict[str, Any]) -> list[Prompt]:
    ids = body.get("input_ids")  # an SGLang extension: a prompt that is already tokenized
    if isinstance(ids, list):
        refuse_empty(ids)
    return [accountant.chat(body)]


ROUTE: Final = Route("/v1/chat/completions", "chat", OPENAI_ANSWERS, _prompts, stream_content=CHAT_STREAMS)
