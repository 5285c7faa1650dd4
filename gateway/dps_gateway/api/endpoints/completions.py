"""POST /v1/completions."""

from collections.abc import Mapping
from typing import Any, Final

from dps_gateway.api.endpoints.base import limit, text_prompts
from dps_gateway.api.endpoints.openai import OpenAIEndpoint
from dps_gateway.prompt.renderer import Prompt, PromptRenderer


class _Completions(OpenAIEndpoint):
    path = "/v1/completions"
    operation = "text_completion"

    def prompts(self, renderer: PromptRenderer, body: dict[str, Any]) -> list[Prompt]:
        return text_prompts(renderer, body.get("prompt"))

    def continuable(self, body: Mapping[str, Any]) -> bool:
        return isinstance(body.get("prompt"), str) and super().continuable(body)

    def rest_request(self, body: Mapping[str, Any], text: str, tokens: int) -> dict[str, Any] | None:
        rest = {"max_tokens": 16, **body}  # the default of SGLang and vLLM
        rest["prompt"] += text
        return rest if limit(rest, text, tokens, "max_tokens", "min_tokens") else None


COMPLETIONS: Final = _Completions()
