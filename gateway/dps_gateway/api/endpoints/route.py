"""The definition of a routed endpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from dps_gateway.api.errors import BadRequest
from dps_gateway.engine.dialect import AnswerFormat
from dps_gateway.engine.stream_content import StreamContent
from dps_gateway.prompt.accounting import Accountant, Prompt, Uncountable

MAX_PROMPTS: Final = 4096
"""The maximum number of prompts of one request that are counted. Even a short one takes hundreds of bytes of memory."""

_MAX_DEPTH: Final = 2
"""Prompts are nested at most as a list of lists of token ids."""


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint whose requests are routed by their session."""

    path: str
    operation: str
    """The span attribute `gen_ai.operation.name`."""
    answers: AnswerFormat
    prompts: Callable[[Accountant, dict[str, Any]], list[Prompt]]
    """The prompts of a request. Only a request with exactly one prompt is a turn of a session.

    Raises BadRequest for empty or too deeply nested prompts and Uncountable for prompts whose length cannot be
    determined.
    """
    salted: tuple[str, ...] = ("cache_salt",)
    """The request fields that receive the tenant's cache salt. If the endpoint has no such field, it is sent in the
    header `x-dps-cache-salt`, which engines with this project's plugin use and others ignore."""
    stream_content: StreamContent | None = None
    """How to compare the streams of deterministic requests, so that another engine can continue a stream whose engine
    has failed. None if they cannot be compared."""
    stores: bool = False
    """Whether engines store the answers, so that later requests can refer to them by `previous_response_id`."""


def refuse_empty(prompts: Any) -> None:
    """Raise BadRequest if any prompt is empty, or if they are nested too deeply.

    Depending on the endpoint, SGLang fails an assertion on an empty prompt, which stops the engine.
    """
    if _has_empty(prompts):
        raise BadRequest("a prompt is empty: every prompt needs at least one character or token id")


def text_prompts(accountant: Accountant, value: Any) -> list[Prompt]:
    """The prompts in a field that holds a string, a list of token ids, or a list of either.

    Raises BadRequest and Uncountable as `Route.prompts` does.
    """
    refuse_empty(value)
    several = isinstance(value, list) and value and not isinstance(value[0], int)
    if several and len(value) > MAX_PROMPTS:
        raise Uncountable("too many prompts")
    return [accountant.text(prompt) for prompt in (value if several else [value])]


def _has_empty(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list):
        if depth == _MAX_DEPTH:
            raise BadRequest("prompts are nested too deeply")
        if value and isinstance(value[0], int):  # one prompt of token ids, which may be long
            return False
        return not value or any(_has_empty(item, depth + 1) for item in value)
    return isinstance(value, str) and not value
