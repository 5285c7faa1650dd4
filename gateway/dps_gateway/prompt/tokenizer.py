"""The engine's tokenizer and chat template, with a faster implementation for counting."""

import json
import logging
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, Self

import fastokens
import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dps_gateway.prompt.tokenizer_loader import Description, TokenizerError, describe

log = logging.getLogger(__name__)

SEGMENT_CACHE_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of the cache of token counts of text segments between special tokens. All sessions share the cache."""

SHORT_TEXT_CHARS: Final = 64
"""Texts up to this length, such as generation prompts, are counted through a separate cache."""


class Tokenizer:
    """Renders chats and counts tokens exactly as an engine with the same tokenizer does."""

    def __init__(self, description: Description) -> None:
        self._backend = _fast_equivalent(description) or _reference(description)
        self._count_short = lru_cache(maxsize=1024)(self._count)
        self.added_tokens = description.added_count
        """Tokens that the engine adds around a plain text prompt, such as a BOS token."""
        self.chat_template = description.template
        templates = {False: description.template, True: description.tools_template}
        self._templates = {tools: compiled(template) for tools, template in templates.items() if template}
        self._description = description
        self.split_token: bytes | None = _split_token(self) if self.chat_template else None

    @classmethod
    def load(cls, source: str, revision: str | None = None) -> Self:
        """Load from a folder or a Hub id. Raises TokenizerError if neither can be loaded.

        revision: branch, tag or commit of a Hub id; its default branch if None.
        """
        return cls(describe(source, revision))

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The prompt text of a chat.

        Raises whatever the template raises for messages that it rejects, and TokenizerError without a template.
        """
        template = self._templates.get(tools is not None)
        if template is None:
            raise TokenizerError(
                "model.tokenizer: the tokenizer has no chat template, so chats cannot be counted"
            )
        text: str = template.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=generation_prompt,
            **self._description.template_tokens | variables,
        )
        return text

    def count(self, text: str) -> int:
        """The number of tokens in `text`. Special tokens in the text are recognised; none are added."""
        if len(text) <= SHORT_TEXT_CHARS:
            return self._count_short(text)
        return self._count(text)

    def _count(self, text: str) -> int:
        return len(self._backend.encode(text, add_special_tokens=False))

    def splits_before(self, token: str) -> bool:
        """Whether tokenization is additive at the start of every occurrence of the special token `token`.

        It is additive if the token is matched on the raw text, does not strip white space on its left, and no other
        added token, nor another occurrence of it, can overlap its beginning.
        """
        if token not in self._description.separating_tokens:
            return False
        return not any(_overlaps(other, token) for other in self._description.added_tokens)

    def special_tokens_in(self, text: str) -> list[str]:
        """The added tokens in `text` at which it can be split, in the order of their first occurrence."""
        found = [(text.find(token), token) for token in self._description.added_tokens]
        return [token for at, token in sorted(found) if at >= 0 and self.splits_before(token)]


def _overlaps(other: str, token: str) -> bool:
    contains = token in other and token != other
    return contains or any(other.endswith(token[:size]) for size in range(1, len(token)))


def _fast_equivalent(description: Description) -> Any | None:
    """A faster implementation of the same tokenizer, or None if it is unsupported or its results differ."""
    try:
        fast = fastokens.Tokenizer.from_json_str(description.definition)
    except Exception as error:  # an unsupported kind of tokenizer; fastokens has no narrower error
        log.warning("using the slower tokenizer for counting: fastokens cannot load this one: %s", error)
        return None
    for sample, ids in description.samples.items():
        if list(fast.encode(sample, add_special_tokens=False).ids) != ids:
            log.warning("using the slower tokenizer for counting: fastokens differs on %r", sample[:40])
            return None
    fast.enable_segment_cache(SEGMENT_CACHE_BYTES)
    return fast


def _reference(description: Description) -> Any:
    """The implementation that transformers uses."""
    from tokenizers import Tokenizer as Reference  # only where it is needed, because of its memory

    return Reference.from_str(description.definition)


def _split_token(tokenizer: Tokenizer) -> bytes | None:
    """The special token at which prompts are split, or None if there is none.

    It is the first special token of the generation prompt, which starts a message. If the generation prompt has none,
    it is the last special token after a user message.
    """
    probe = [{"role": "user", "content": "user message"}]
    try:
        prompt = tokenizer.render(probe, None, {})
        history = tokenizer.render(probe, None, {}, generation_prompt=False)
    except Exception as error:  # a template may raise anything
        log.warning(
            "the chat template rejects a minimal chat (%s); prompts are tokenized completely on every turn",
            error,
        )
        return None
    opening = prompt[len(history) :] if prompt.startswith(history) else ""
    closing = prompt[prompt.rfind("user message") :]
    candidates = tokenizer.special_tokens_in(opening) or tokenizer.special_tokens_in(closing)[-1:]
    return candidates[0].encode() if candidates else None


class _Generation(Extension):
    """The statement `{% generation %}`, which marks text for training. It renders its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_DICT_ATTRIBUTES: Final = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which templates read the fields of messages faster."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The value of `obj.attribute` in a template.

        For a field of a message, Jinja catches one or two exceptions, which takes half of the time for a long chat.
        """
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)


def compiled(chat_template: str) -> jinja2.Template:
    """The template, with the extensions, filters and functions that transformers provides to it.

    It is in a sandbox, because it may come from a model hub. Raises jinja2.TemplateError."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    template = environment.from_string(chat_template)
    # Jinja copies the globals for every rendering, which takes several times as long for its ChainMap.
    template.globals = dict(template.globals)
    return template


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's filter, this one does not escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # noqa: DTZ005 - local time, as in transformers
