"""Renders and tokenizes a request's prompt as SGLang 0.5.23's serving_chat does with transformers' tokenizer.

The whole prompt is rendered and tokenized. Tests compare the gateway's incremental counter with this module,
so the two share no counting code.
"""

import os
from collections.abc import Sequence
from typing import Any

import jinja2
import orjson

from dps_gateway.prompt.chat import normalized_schema
from dps_gateway.prompt.messages import renders_inline_system
from dps_local.emulated_sglang.generation import Vocabulary
from dps_local.emulated_sglang.protocol import ChatRequest, Tool, ToolChoice

VOCABULARY_SIZE = 2048
Inputs = str | list[str] | list[int] | list[list[int]]
MEDIA_KEYWORDS = ("image", "audio", "video", "vision")


class Prompts:
    """Renders and tokenizes prompts with one model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._adds_special_tokens = len(tokenizer.encode("")) > 0
        self._parts_template = _iterates_over_content(tokenizer.chat_template)
        template = tokenizer.chat_template
        self.renders_inline_system = isinstance(template, str) and renders_inline_system(template)
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
        chat = {"messages": messages, "tools": list(tools) or None}
        return len(self.encode_chat(ChatRequest.model_validate(chat)))

    def text_tokens(self, text: str) -> int:
        """The number of tokens of a text, without adding special tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: list[int]) -> str:
        """The text of `token_ids`, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def encode_chat(self, request: ChatRequest) -> tuple[int, ...]:
        """The prompt of a chat request. Raises ValueError where SGLang answers with status 400."""
        if request.input_ids is not None:
            return tuple(request.input_ids)
        messages = [self._template_message(message.model_dump()) for message in request.messages]
        messages, prefix = _last_assistant_message(messages, request.continue_final_message)
        kwargs = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        text = self._render(messages, _template_tools(request), kwargs)
        special = {"add_special_tokens": False} if self._adds_special_tokens else {}
        prompt = list(self._tokenizer.encode(text, **special))
        if prefix:
            answer = list(self._tokenizer.encode(prefix))
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

    def _template_message(self, message: dict[str, Any]) -> dict[str, Any]:
        _parse_arguments(message)
        content = message["content"]
        if content is None:
            content = ""
        elif isinstance(content, list) and self._parts_template:
            content = [part for part in content if part["type"] in ("text", "tool_reference")]
            if message["role"] == "tool" and all(part["type"] == "text" for part in content):
                content = " ".join(part["text"] for part in content)
        elif isinstance(content, list):
            content = " ".join(part["text"] for part in content if part["type"] == "text")
        return {key: value for key, value in {**message, "content": content}.items() if value is not None}

    def _render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]
    ) -> str:
        def render(tools: list[dict[str, Any]] | None) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=True, **kwargs
                )
            )

        try:
            return render(tools)
        except Exception:
            # Some templates expect tools without the OpenAI wrapper.
            try:
                return render([tool["function"] for tool in tools] if tools else None)
            except (jinja2.TemplateError, TypeError) as error:
                raise ValueError(str(error)) from error


def _template_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools passed to the template: none for `tool_choice: none`, only the named one for a named choice."""
    tools: list[Tool] = request.tools or []
    if request.tool_choice == "none":
        return None
    if isinstance(request.tool_choice, ToolChoice):
        chosen = request.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == chosen]
    dumped = [tool.model_dump() for tool in tools]
    for tool in dumped:
        tool["function"]["parameters"] = normalized_schema(tool["function"]["parameters"])
    return dumped or None


def _parse_arguments(message: dict[str, Any]) -> None:
    """Parse tool call arguments: templates expect objects. Raises ValueError if they are not a JSON object."""
    if message["role"] != "assistant":
        return
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            continue
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise ValueError("Assistant tool call function.arguments must be valid JSON.") from error
        if not isinstance(parsed, dict):
            raise ValueError("Assistant tool call function.arguments must be a JSON object.")
        call["function"]["arguments"] = parsed


def _last_assistant_message(
    messages: list[dict[str, Any]], continued: bool
) -> tuple[list[dict[str, Any]], str | None]:
    """Split off a final assistant message if the answer continues it; otherwise make it a user message."""
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        return messages, None
    if continued:
        return messages[:-1], last["content"]
    return [*messages[:-1], {"role": "user", "content": last["content"]}], None


def _iterates_over_content(template: Any) -> bool:
    """Whether a template takes content as a list of parts, as detected by SGLang's jinja_template_utils."""
    if not isinstance(template, str):
        return False
    if any(keyword in template for keyword in MEDIA_KEYWORDS):
        return True
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError:
        return False
    loops = tree.find_all(jinja2.nodes.For)
    return any(_is_content(loop.iter, name) for loop in loops for name in ("message", "msg", "m"))


def _is_content(node: jinja2.nodes.Node | None, variable: str) -> bool:
    if isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test):
        return _is_content(node.node, variable)
    if isinstance(node, jinja2.nodes.Getitem):
        if isinstance(node.arg, jinja2.nodes.Slice):
            return _is_content(node.node, variable)
        named = isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content"
    elif isinstance(node, jinja2.nodes.Getattr):
        named = node.attr == "content"
    else:
        return False
    return named and isinstance(node.node, jinja2.nodes.Name) and node.node.name == variable
