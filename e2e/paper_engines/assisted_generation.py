"""Greedy decoding with Transformers, with or without a draft model: the paper's method D.

The draft model proposes tokens until one of them has a probability below a threshold, and one pass of the target
model verifies them. Transformers generates for one request at a time, and keeps no KV cache between requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_sklearn_available


@dataclass(frozen=True)
class Drafting:
    """Speculative decoding with a draft model.

    model: the draft model's folder. tokens: the most tokens that it proposes for one verification.
    confidence: it stops after a token that has a lower probability.
    """

    model: Path
    tokens: int
    confidence: float


@dataclass(frozen=True)
class Generated:
    """The tokens of an answer, and how they were generated.

    target_passes: forward passes of the target model. Each yields one token of its own.
    accepted_tokens, rejected_tokens: the draft model's tokens.
    """

    tokens: Sequence[int]
    target_passes: int
    accepted_tokens: int
    rejected_tokens: int


class AssistedModel:
    """A target model with its tokenizer, and perhaps a draft model."""

    def __init__(self, folder: Path, drafting: Drafting | None) -> None:
        """Load the models. Raises OSError if a folder has no model.

        Raises RuntimeError if scikit-learn is installed, because Transformers then changes the threshold during a
        request.
        """
        if is_sklearn_available():
            raise RuntimeError(
                "uninstall scikit-learn: with it, Transformers adapts the confidence threshold"
            )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._target = _load(folder)
        self._target.register_forward_pre_hook(self._record_pass, with_kwargs=True)
        self._pass_lengths: list[int] = []
        self._options: dict[str, Any] = {}
        self.context_length: int = self._target.config.max_position_embeddings
        ends = self._target.generation_config.eos_token_id
        self.end_tokens: frozenset[int] = frozenset([ends] if isinstance(ends, int) else ends)
        if drafting is not None:
            draft = _load(drafting.model)
            # Transformers reads these settings of the draft model only, and ignores them in a call of generate().
            draft.generation_config.num_assistant_tokens = drafting.tokens
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = drafting.confidence
            self._options["assistant_model"] = draft

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """The tokens of a chat, with the generation prompt. Raises jinja2.TemplateError if it cannot be rendered."""
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def generate(
        self, prompt: Sequence[int], max_tokens: int, emit: Callable[[str], None], stopped: Callable[[], bool]
    ) -> Generated:
        """Generate an answer of at most `max_tokens`, which ends early when `stopped` returns True.

        emit: receives the text of each verified step, without special tokens.
        """
        self._pass_lengths.clear()
        text = _TextStream(self._tokenizer, emit)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            self._target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                # Transformers derives the draft model's attention mask from the padding token, unless that is an end
                # token, and would hide a padding token that is part of the prompt.
                pad_token_id=min(self.end_tokens),
                max_new_tokens=max_tokens,
                do_sample=False,
                streamer=text,
                stopping_criteria=[lambda rows, scores, **_: torch.full((len(rows),), stopped())],
                **self._options,
            )
        passes = len(self._pass_lengths)
        drafted = sum(self._pass_lengths) - len(prompt) - (passes - 1)
        accepted = len(text.tokens) - passes
        return Generated(text.tokens, passes, accepted, drafted - accepted)

    def _record_pass(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        self._pass_lengths.append(ids.shape[-1])


class _TextStream:
    """A streamer of Transformers. It holds back characters whose tokens are not complete."""

    def __init__(self, tokenizer: Any, emit: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._emit = emit
        self._prompt_seen = False
        self._start = self._sent = 0
        self.tokens: list[int] = []

    def put(self, value: Any) -> None:
        """Called with the prompt and then with the tokens of every step."""
        if self._prompt_seen:
            self.tokens += value.flatten().tolist()
            self._send(final=False)
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token."""
        self._send(final=True)

    def _send(self, *, final: bool) -> None:
        # The text of a token can depend on the token before it, so the tokens of two steps are decoded together.
        before = self._decode(self._sent)
        text = self._decode(len(self.tokens))
        if final or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            if len(text) > len(before):
                self._emit(text[len(before) :])
            self._start, self._sent = self._sent, len(self.tokens)

    def _decode(self, end: int) -> str:
        text: str = self._tokenizer.decode(self.tokens[self._start : end], skip_special_tokens=True)
        return text


def _load(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.eval()
