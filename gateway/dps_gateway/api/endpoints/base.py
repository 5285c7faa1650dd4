"""What the gateway has to know about a routed endpoint. This module performs no I/O."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from dps_gateway.api.errors import BadRequest, OpenAIErrors
from dps_gateway.engine.usage import Usage
from dps_gateway.prompt.renderer import Prompt, PromptRenderer, Uncountable

MAX_PROMPTS: Final = 4096
"""The maximum number of prompts of one request that are counted. Even a short one takes hundreds of bytes of memory."""

_MAX_DEPTH: Final = 2
"""Prompts are nested at most as a list of lists of token ids."""


class Endpoint(OpenAIErrors, ABC):
    """An endpoint whose requests are routed by their session: its prompts, the usage in its answers, and its errors."""

    path: str
    operation: str
    """The span attribute `gen_ai.operation.name`."""
    salted: tuple[str, ...] = ("cache_salt",)
    """The request fields that receive the tenant's cache salt. If the endpoint has no such field, it is sent in the
    header `x-dps-cache-salt`, which engines with this project's plugin use and others ignore."""
    stores: bool = False
    """Whether engines store the answers, so that later requests can refer to them by `previous_response_id`."""
    closing: tuple[bytes, ...]
    """The first bytes of each event that can end a stream."""
    usage_markers: tuple[bytes, ...]
    """Each stream event with usage contains one of these texts, so that other events need no parsing. Quotes in
    generated text are escaped, so it never contains them."""
    heartbeat: bytes = b": heartbeat\n\n"
    """The event that is sent while a stream is silent. Clients ignore it."""
    part_marker: re.Pattern[bytes] | None = None
    """Matches, in a stream event with the usage of one of several answers, the number of that answer (group 1). None if
    every event with usage has that of the whole request."""

    @abstractmethod
    def prompts(self, renderer: PromptRenderer, body: dict[str, Any]) -> list[Prompt]:
        """The prompts of a request. Only a request with exactly one prompt is a turn of a session.

        Raises BadRequest for empty or too deeply nested prompts and Uncountable for prompts whose length cannot be
        determined.
        """

    @abstractmethod
    def usage_of(self, document: Any) -> Usage | None:
        """The usage in a parsed answer or stream event, or None if it reports none that is valid."""

    def added_fields(self, body: Mapping[str, Any], *, sources: bool, drafts: bool) -> dict[str, Any]:
        """The request fields that make the engine report usage. What it then reports is not relayed to the client.

        Raises BadRequest for a field that cannot be extended.

        sources, drafts: whether to request the sources of cached tokens, and the accepted drafts, as well.
        """
        return {}

    def read_usage(self, document: bytes) -> Usage | None:
        """The usage in the bytes of an answer or stream event, or None if they are not JSON or report none."""
        try:
            return self.usage_of(orjson.loads(document))
        except orjson.JSONDecodeError:
            return None


class NotContinuable(Exception):
    """The stream cannot be continued."""


@dataclass(slots=True)
class DeliveredText:
    """What a client has received of a stream."""

    text: str = ""
    """The text of the answer."""
    event: dict[str, Any] = field(default_factory=dict)
    """The last event with a part of the answer; empty before the first one."""
    finished: bool = False
    """Whether the answer is complete."""
    usage_sent: bool = False
    """Whether an event that contains only usage has been received."""


class TextEndpoint(Endpoint):
    """An endpoint whose streams another engine can continue."""

    @abstractmethod
    def continuable(self, body: Mapping[str, Any]) -> bool:
        """Whether the answer to a request with this body can be continued while it is one plain text."""

    @abstractmethod
    def read(self, event: dict[str, Any], received: DeliveredText) -> None:
        """Add an event to `received`. Raises NotContinuable if it contains something other than text."""

    @abstractmethod
    def rest_request(self, body: Mapping[str, Any], text: str, tokens: int) -> dict[str, Any] | None:
        """The body of the request for the rest of an answer that begins with `text`, which has `tokens` tokens.

        None if the answer already has as many tokens as `body` allows. Raises NotContinuable.
        """

    @abstractmethod
    def join(
        self, event: dict[str, Any], received: DeliveredText, count: Callable[[dict[str, Any]], None]
    ) -> bool:
        """Change an event of the other engine to one of the whole answer. Returns whether to forward it.

        count: changes token counts to those of the whole answer.
        """

    @abstractmethod
    def ending(self, received: DeliveredText, usage: Usage | None) -> bytes:
        """The events that end an answer to which nothing is added; `usage` is included unless it is None."""


_REFUSED: Final = (
    # An engine would apply a grammar to the rest of the answer as if it were the whole answer.
    *("ebnf", "json_schema", "regex", "structural_tag", "structured_outputs"),
    *("echo", "input_ids", "stop_regex", "suffix", "use_beam_search"),
)
"""Fields of requests whose answers are not continued."""


def is_plain(sampling: Mapping[str, Any]) -> bool:
    """Whether one answer without probabilities and without a grammar is requested."""
    one = sampling.get("n") in (None, 1)
    probabilities = sampling.get("logprobs")
    plain = probabilities is None or probabilities is False  # 0 requests those of the generated tokens
    text = sampling.get("response_format") in (None, {"type": "text"})
    return one and plain and text and not any(sampling.get(name) for name in _REFUSED)


def string(text: Any) -> str:
    """A part of a text. Raises NotContinuable if it is neither a string nor None."""
    if text is None or isinstance(text, str):
        return text or ""
    raise NotContinuable("a text is not a string")


def limit(sampling: dict[str, Any], text: str, tokens: int, *names: str) -> bool:
    """Reduce limits by the tokens of `text`. Returns False if one of the upper ones is used up.

    Raises NotContinuable if the text may end with a part of a stop string, which the other engine would not recognise.
    """
    stops = sampling.get("stop")
    for stop in [stops] if isinstance(stops, str) else stops or []:
        if any(text.endswith(stop[:size]) for size in range(1, len(stop))):
            raise NotContinuable("the text ends with the beginning of a stop string")
    for name in names:
        if isinstance(most := sampling.get(name), int):
            sampling[name] = max(0, most - tokens)
            if tokens >= most and name.startswith("max"):
                return False
    return True


def refuse_empty(prompts: Any) -> None:
    """Raise BadRequest if any prompt is empty, or if they are nested too deeply.

    Depending on the endpoint, SGLang fails an assertion on an empty prompt, which stops the engine.
    """
    if _has_empty(prompts):
        raise BadRequest("a prompt is empty: every prompt needs at least one character or token id")


def text_prompts(renderer: PromptRenderer, value: Any) -> list[Prompt]:
    """The prompts in a field that holds a string, a list of token ids, or a list of either.

    Raises BadRequest and Uncountable as `Endpoint.prompts` does.
    """
    refuse_empty(value)
    several = isinstance(value, list) and value and not isinstance(value[0], int)
    if several and len(value) > MAX_PROMPTS:
        raise Uncountable("too many prompts")
    return [renderer.text(prompt) for prompt in (value if several else [value])]


def _has_empty(value: Any, depth: int = 0) -> bool:
    if isinstance(value, list):
        if depth == _MAX_DEPTH:
            raise BadRequest("prompts are nested too deeply")
        if value and isinstance(value[0], int):  # one prompt of token ids, which may be long
            return False
        return not value or any(_has_empty(item, depth + 1) for item in value)
    return isinstance(value, str) and not value
