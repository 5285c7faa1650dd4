"""POST /generate, SGLang's native endpoint."""

from typing import Any, Final

from dps_gateway.api.endpoints.route import Route, text_prompts
from dps_gateway.engine.sglang import GENERATE_ANSWERS
from dps_gateway.engine.stream_content import GENERATE_STREAMS
from dps_gateway.prompt.accounting import Accountant, Prompt


def _prompts(accountant: Accountant, body: dict[str, Any]) -> list[Prompt]:
    text = body.get("text")
    return text_prompts(accountant, text if text is not None else body.get("input_ids"))


# In SGLang 0.5.8, /generate ignores cache_salt, but has extra_key, which separates caches as well.
ROUTE: Final = Route(
    "/generate",
    "text_completion",
    GENERATE_ANSWERS,
    _prompts,
    salted=("cache_salt", "extra_key"),
    stream_content=GENERATE_STREAMS,
)
