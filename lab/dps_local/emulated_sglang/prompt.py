"""Renders and tokenizes a request's prompt as SGLang 0.5.23's serving_chat does with transformers' tokenizer.

The input of the chat template is that of the gateway, which is tested against prompts recorded from SGLang. The whole
prompt is rendered and tokenized. Tests compare the gateway's incremental counter with this module, so the two share no
counting code.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import orjson

from dps_gateway.prompt.chat import ChatInput, chat_input, content_format
from dps_gateway.prompt.messages import renders_inline_system
from dps_local.emulated_sglang.generation import Vocabulary

VOCABULARY_SIZE = 2048
Inputs = str | list[str] | list[int] | list[list[int]]


class Prompts:
    """Renders and tokenizes prompts with one model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._adds_special_tokens = len(tokenizer.encode("")) > 0
        template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
        self._content_format = content_format(template)
        self.renders_inline_system = renders_inline_system(template)
        """Whether the chat template renders a system message that is not the first message."""

    @classmethod
    def load(cls, directory: str) -> "Prompts":
        """Load a tokenizer from a local directory. Raises ValueError if a file is missing or invalid."""
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"no tokenizer in {directory!r}: --tokenizer-path takes a directory with tokenizer.json and "
                f"tokenizer_config.json ({error})"
            ) from error
        return cls(tokenizer)

    def encode_inputs(self, inputs: Inputs) -> tuple[list[tuple[int, ...]], bool]:
        """The prompts of a request that is not a chat, and whether the request is a batch."""
        if isinstance(inputs, str):
            return [tuple(self._tokenizer.encode(inputs))], False
        token_ids = tuple(item for item in inputs if isinstance(item, int))
        if token_ids:
            return [token_ids], False
        batch = (item for item in inputs if not isinstance(item, int))
        return [
            tuple(self._tokenizer.encode(item) if isinstance(item, str) else item) for item in batch
        ], True

    def prompt_tokens(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> int:
        """L: the number of tokens of a chat's rendered prompt, including tools and generation prompt."""
        return len(self.encode_chat({"messages": messages, "tools": list(tools)}))

    def text_tokens(self, text: str) -> int:
        """The number of tokens of a text, without adding special tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def encode_chat(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        """The prompt of a valid chat request. Raises ValueError where SGLang answers with status 400."""
        if body.get("input_ids") is not None:
            return tuple(body["input_ids"])
        try:
            chat = chat_input(dict(body), self._content_format)
        except orjson.JSONDecodeError as error:
            raise ValueError("Assistant tool call function.arguments must be valid JSON.") from error
        except (KeyError, TypeError) as error:
            raise ValueError(f"invalid chat: {error!r}") from error
        for message in chat.messages:
            for call in message.get("tool_calls", ()) if message["role"] == "assistant" else ():
                if not isinstance(call["function"]["arguments"], dict | None):
                    raise ValueError("Assistant tool call function.arguments must be a JSON object.")
        text = self._render(chat)
        special = {"add_special_tokens": False} if self._adds_special_tokens else {}
        prompt = list(self._tokenizer.encode(text, **special))
        if chat.continuation:
            answer = list(self._tokenizer.encode(chat.continuation))
            prompt += answer[1:] if answer[:1] == [self._tokenizer.bos_token_id] else answer
        return tuple(prompt)

    def vocabulary(self) -> Vocabulary:
        """The tokens that are a lower-case word with a leading space. Raises ValueError if there are none."""
        pieces: dict[int, str] = {}
        tokenizer = self._tokenizer
        start = tokenizer.encode("a", add_special_tokens=False)
        prefix = len(tokenizer.decode(start))
        for token_id in range(len(tokenizer)):
            piece = tokenizer.decode([*start, token_id])[prefix:]
            word = piece[1:]
            if (
                piece.startswith(" ")
                and len(word) > 2
                and word.isascii()
                and word.islower()
                and word.isalpha()
            ):
                if tokenizer.encode("a" + piece, add_special_tokens=False) == [*start, token_id]:
                    pieces[token_id] = piece
                if len(pieces) == VOCABULARY_SIZE:
                    break
        if not pieces:
            raise ValueError("the tokenizer has no token that is a word with a space before it")
        return Vocabulary(tuple(pieces), pieces, int(tokenizer.eos_token_id))

    def _render(self, chat: ChatInput) -> str:
        def render(tools: list[dict[str, Any]] | None) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    chat.messages, tools=tools, tokenize=False, add_generation_prompt=True, **chat.variables
                )
            )

        try:
            return render(chat.tools)
        except Exception:
            # Some templates expect tools without the OpenAI wrapper.
            try:
                return render([tool["function"] for tool in chat.tools] if chat.tools else None)
            except (jinja2.TemplateError, TypeError) as error:
                raise ValueError(str(error)) from error
