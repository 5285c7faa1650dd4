"""The engine's tokenizer and chat template, with a faster implementation for counting."""

import logging
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import fastokens  # after the environment variables above are set
from transformers import AutoTokenizer

# `apply_chat_template` uses this function too, but it also validates every message.
from transformers.utils.chat_template_utils import _compile_jinja_template

log = logging.getLogger(__name__)

SEGMENT_CACHE_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of the cache of token counts of text segments between special tokens. All sessions share the cache."""

SHORT_TEXT_CHARS: Final = 64
"""Texts up to this length, such as generation prompts, are counted through a separate cache."""

_PROBES: Final = (
    "",
    " leading and trailing ",
    "line\r\n\r\n\tindented  twice",
    "naïve café 한국어 日本語 Ω ﬁ e\u0301 👩‍👩‍👧 \u200d",
    "don't we'LL 12345 x=1;// {\"a\": [1, 2]}",
)


DEFAULT_REVISION: Final = "main"


class TokenizerError(Exception):
    """The tokenizer cannot be used. The message states what to change."""


class Tokenizer:
    """Renders chats and counts tokens exactly as an engine with the same tokenizer does."""

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                "model.tokenizer: this tokenizer has no tokenizer.json; convert it to a fast tokenizer"
            )
        self._backend = backend
        self._fast = _fast_equivalent(backend)
        self._count_short = lru_cache(maxsize=1024)(self._count)
        self.added_tokens: int = backend.num_special_tokens_to_add(is_pair=False)
        """Tokens that the engine adds around a plain text prompt, such as a BOS token."""
        self.chat_template: str | None = _chat_template(hf, None)
        self._templates = {
            tools: _compile_jinja_template(template)
            for tools in (False, True)
            if (template := _chat_template(hf, [] if tools else None))
        }
        self._template_tokens: dict[str, Any] = dict(hf.special_tokens_map)
        self.split_token: bytes | None = _split_token(self) if self.chat_template else None

    @classmethod
    def load(cls, source: str, revision: str | None = None) -> "Tokenizer":
        """Load from a folder or a hub id. Raises TokenizerError if neither can be loaded.

        revision: branch, tag or commit of a hub id; its default branch if None.
        """
        folder = Path(source)
        looks_like_a_path = source.startswith((".", "/", "~")) or folder.exists()
        if looks_like_a_path and not folder.expanduser().is_dir():
            raise TokenizerError(
                f"model.tokenizer: there is no folder '{source}'; give a folder that holds tokenizer.json and "
                "tokenizer_config.json, or a hub id"
            )
        try:
            if looks_like_a_path:
                hf = AutoTokenizer.from_pretrained(str(folder.expanduser()))
            else:
                hf = AutoTokenizer.from_pretrained(source, revision=revision or DEFAULT_REVISION)
        except Exception as error:  # transformers has no common base class for loading errors
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise TokenizerError(
                f"model.tokenizer: '{source}' cannot be loaded ({reason}); give a folder that holds "
                "tokenizer.json and tokenizer_config.json, or a hub id that this machine can reach"
            ) from error
        return cls(hf)

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
            **self._template_tokens | variables,
        )
        return text

    def count(self, text: str) -> int:
        """The number of tokens in `text`. Special tokens in the text are recognised; none are added."""
        if len(text) <= SHORT_TEXT_CHARS:
            return self._count_short(text)
        return self._count(text)

    def _count(self, text: str) -> int:
        if self._fast is not None:
            return len(self._fast.encode(text, add_special_tokens=False))
        return len(self._backend.encode(text, add_special_tokens=False))

    def splits_before(self, token: str) -> bool:
        """Whether tokenization is additive at the start of every occurrence of the special token `token`.

        It is additive if the token is matched on the raw text, does not strip white space on its left, and no other
        added token can overlap its beginning.
        """
        added = {str(t): t for t in self._hf.added_tokens_decoder.values()}
        special = added.get(token)
        if special is None or special.normalized or special.lstrip or special.single_word:
            return False
        return not any(_overlaps(other, token) for other in added if other != token)

    def special_tokens_in(self, text: str) -> list[str]:
        """The added tokens in `text` at which it can be split, in the order of their first occurrence."""
        found = [(text.find(token), token) for token in map(str, self._hf.added_tokens_decoder.values())]
        return [token for at, token in sorted(found) if at >= 0 and self.splits_before(token)]


def _chat_template(hf: Any, tools: list[Any] | None) -> str | None:
    """The template that transformers would select; some tokenizers have a separate one for tools."""
    template = hf.chat_template
    if isinstance(template, dict):
        template = (
            template.get("tool_use") if tools is not None and "tool_use" in template else template["default"]
        )
    return template if isinstance(template, str) else None


def _overlaps(other: str, token: str) -> bool:
    return token in other or any(other.endswith(token[:size]) for size in range(1, len(token)))


def _fast_equivalent(backend: Any) -> Any | None:
    """A faster implementation of the same tokenizer, or None if it is unsupported or its results differ."""
    try:
        fast = fastokens.Tokenizer.from_json_str(backend.to_str())
    except Exception as error:  # an unsupported kind of tokenizer; fastokens has no narrower error
        log.warning("using the slower tokenizer for counting: fastokens cannot load this one: %s", error)
        return None
    specials = [str(token) for token in backend.get_added_tokens_decoder().values()][:64]
    for probe in (*_PROBES, "".join(specials), " x ".join(specials)):
        if list(fast.encode(probe, add_special_tokens=False).ids) != list(
            backend.encode(probe, add_special_tokens=False).ids
        ):
            log.warning("using the slower tokenizer for counting: fastokens differs on %r", probe[:40])
            return None
    fast.enable_segment_cache(SEGMENT_CACHE_BYTES)
    return fast


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
