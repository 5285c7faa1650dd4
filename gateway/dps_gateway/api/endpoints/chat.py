"""POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any, Final

from dps_gateway.api.endpoints.base import NotContinuable, limit, refuse_empty, string
from dps_gateway.api.endpoints.openai import OpenAIEndpoint, has_only
from dps_gateway.prompt.renderer import Prompt, PromptRenderer

_DELTA_FIELDS: Final = frozenset({"role", "content"})


class _Chat(OpenAIEndpoint):
    path = "/v1/chat/completions"
    operation = "chat"
    _empty: Mapping[str, Any] = {"delta": {}}

    def prompts(self, renderer: PromptRenderer, body: dict[str, Any]) -> list[Prompt]:
        ids = body.get("input_ids")  # an SGLang extension: a prompt that is already tokenized
        if isinstance(ids, list):
            refuse_empty(ids)
        return [renderer.chat(body)]

    def continuable(self, body: Mapping[str, Any]) -> bool:
        match body.get("messages"):
            case [*_, {"role": "assistant", "content": content}]:
                # Without continue_final_message, SGLang makes this message one of the user.
                continued = body.get("continue_final_message") is True and isinstance(content, str)
            case [*_, {}]:
                continued = not body.get("continue_final_message")
            case _:
                continued = False
        chosen = body.get("tool_choice")
        return continued and (chosen is None or chosen in ("auto", "none")) and super().continuable(body)

    def text_of(self, choice: dict[str, Any]) -> str:
        delta = choice.get("delta")
        if not isinstance(delta, dict) or not has_only(delta, _DELTA_FIELDS):
            raise NotContinuable("a delta has something other than content")
        return string(delta.get("content"))

    def rest_request(self, body: Mapping[str, Any], text: str, tokens: int) -> dict[str, Any] | None:
        rest = dict(body)
        if text:
            messages, begun = body["messages"], ""
            if body.get("continue_final_message"):
                messages, begun = messages[:-1], messages[-1]["content"]
            rest["messages"] = [*messages, {"role": "assistant", "content": begun + text}]
            # vLLM refuses requests that add a generation prompt as well; SGLang ignores the second field.
            rest |= {"continue_final_message": True, "add_generation_prompt": False}
        limits = ("max_tokens", "max_completion_tokens", "min_tokens")
        return rest if limit(rest, text, tokens, *limits) else None


CHAT: Final = _Chat()
