"""record_responses.py OUT: record how SGLang converts requests of OpenAI's Responses API to chat requests (JSON).

    PYTHONPATH=. e2e/real_sglang/sglang-python -m e2e.real_sglang.record_responses \
        tests/gateway/fixtures/responses_sglang_0_5_23.json

Runs SGLang's own conversion, without a server, for a chat template with and without system messages after the first
message. `record_prompts.py` records the resulting prompt lengths for one template.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, NoReturn

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses

from e2e.real_sglang.prompts import MODEL
from e2e.real_sglang.record_messages import RECORDED
from e2e.real_sglang.responses import response_bodies


class Converted(BaseException):
    """Carries the chat request out of the handler, which would render it next."""

    def __init__(self, chat: ChatCompletionRequest) -> None:
        self.chat = chat


class Handler(OpenAIServingResponses):  # type: ignore[misc]  # mypy does not see SGLang
    """The part of SGLang's handler of /v1/responses that converts requests."""

    def __init__(self, *, inline_system: bool) -> None:
        self.supports_inline_system = inline_system
        self.tool_call_parser = self.tool_server = None
        self.use_harmony = self._translates_tools = self.enable_response_store = self.is_disaggregated = False
        self.tokenizer_manager = type("Manager", (), {"tokenizer": None, "model_config": self})()
        self.is_multimodal = True

    def _validate_model(self, model: str | None) -> None:
        return None

    def _validate_media_content(self, request: ChatCompletionRequest) -> None:
        return None

    def _process_messages(self, request: ChatCompletionRequest, *_: Any, **__: Any) -> NoReturn:
        raise Converted(request)


def converted(handler: Handler, body: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of the chat request that affect the prompt, or None if SGLang refuses the request."""
    try:
        asyncio.run(handler.create_responses(ResponsesRequest(**json.loads(json.dumps(body)))))
    except ValueError:
        return None
    except Converted as done:
        # As the chat handler passes them to the template: messages without fields that are null.
        messages = [message.model_dump(exclude_none=True) for message in done.chat.messages]
        dumped = done.chat.model_dump() | {"messages": messages}
        return {name: dumped[name] for name in RECORDED if dumped[name] is not None}
    return None


def main(out: Path) -> None:
    """Record into `out`, one request per line; with inline system messages only what is converted differently."""
    lines: list[str] = []
    usual: dict[str, Any] = {}
    for inline_system in (False, True):
        handler = Handler(inline_system=inline_system)
        for name, fields in response_bodies():
            body = {"model": MODEL} | fields
            chat = converted(handler, body)
            if name in usual and usual[name] == chat:
                continue
            usual.setdefault(name, chat)
            lines.append(
                json.dumps({"name": name, "inline_system": inline_system, "body": body, "chat": chat})
            )
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
