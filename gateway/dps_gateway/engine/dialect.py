"""The interface between the gateway and an inference engine. This module performs no I/O.

SGLang's dialect also serves vLLM, whose API is close enough. To support an engine with another API, write a module
beside `sglang.py` whose class implements `EngineDialect`, and construct it where `runtime.py` constructs `SGLang`.

Code outside this package that depends on the kind of engine: the chat rules in `prompt`, which follow SGLang; SGLang's
extensions of the OpenAI API in `api` and `prompt` (/generate, /model_info, /server_info and `input_ids`); and the
differences between SGLang's and vLLM's lists of models and administrative endpoints in `api/model_list.py` and
`api/passthrough.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import orjson

from dps_gateway.prompt.chat import ChatInput, ContentFormat
from dps_gateway.upstream.replica import Configuration, Load

MAX_TOKENS: Final = 2**40
"""Larger counts are not valid. Sums of valid ones have less than 64 bits, as in spans and in shared memory."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer, or the sums over several answers to a request, as the engine reports them."""

    prompt_tokens: int
    """0 if the answer does not report it yet, because the engine answers in the background."""
    completion_tokens: int
    cached_tokens: int | None = None
    """Prompt tokens found in the KV cache, or None if the engine does not report them."""
    fetched_tokens: int | None = None
    """The part of `cached_tokens` that was fetched from storage, or None if the engine does not report it. It is 0 if
    no token was cached."""
    finish_reason: str | None = None
    response_id: str | None = None
    model: str | None = None
    several: bool = False
    """Whether these are sums. Each of several samples of a prompt adds the prompt's tokens."""


@dataclass(frozen=True, slots=True)
class RequestedByGateway:
    """What the gateway requests of an engine on the client's behalf, so that it must not be relayed to the client."""

    usage: bool = False
    """Token usage, which a stream reports in an event of its own."""
    sources: bool = False
    """Where the cached tokens were found (see `sources.py`)."""


class AnswerFormat(Protocol):
    """The format in which the answers of an endpoint, streamed or not, report token usage."""

    @property
    def closing(self) -> tuple[bytes, ...]:
        """The first bytes of each event that can end a stream."""

    @property
    def usage_marker(self) -> re.Pattern[bytes]:
        """Matches a stream event that may carry usage or `sources`, so that other events need no parsing."""

    @property
    def part_marker(self) -> re.Pattern[bytes] | None:
        """Matches, in a stream event with the usage of one of several answers, the number of that answer (group 1).

        None if every event with usage has that of the whole request.
        """

    def request_usage(
        self, body: Mapping[str, Any], raw: bytes, *, sources: bool
    ) -> tuple[bytes, RequestedByGateway]:
        """Returns the request body to send, and what it requests on the client's behalf.

        `raw` is the client's request body; `body` is the same, parsed. `sources`: whether to request the sources of
        cached tokens as well, if the endpoint can report them.
        """

    def usage_of(self, document: Any) -> Usage | None:
        """The usage in a parsed answer or stream event, or None if it reports none that is valid."""


class ErrorFormat(Protocol):
    """The format of an endpoint's errors, which its clients expect."""

    def error(self, status: int, kind: str, code: str, message: str) -> bytes:
        """The body for an error of the gateway; `kind` and `code` are OpenAI's `type` and `code`."""

    def of_engine(self, status: int, content: bytes) -> bytes:
        """The body for an engine's error, whose own body is `content`."""

    def event(self, body: bytes) -> bytes:
        """The event that ends a stream with an error."""


class EngineDialect(Protocol):
    """The requests, answers and rules that are specific to one kind of inference server."""

    @property
    def provider(self) -> str:
        """The span attribute `gen_ai.provider.name`."""

    @property
    def health_path(self) -> str:
        """The path that health checks request.

        It must be cheap, and must answer with a status below 500 if and only if the engine is ready.
        """

    @property
    def generation_path(self) -> str:
        """The path that checks whether the engine generates tokens.

        Its status is 5xx if the engine generates none, neither for this request nor for others.
        """

    @property
    def load_path(self) -> str:
        """The path at which the engine reports its load."""

    def load_of(self, document: Any) -> Load | None:
        """The load in a parsed answer to a request of `load_path`, or None if it reports none that is valid."""

    @property
    def configuration_path(self) -> str:
        """The path at which the engine reports its configuration."""

    def configuration_of(self, document: Any) -> Configuration | None:
        """The configuration in a parsed answer to a request of `configuration_path`, or None if it has none."""

    @property
    def cache_fields(self) -> tuple[str, ...]:
        """The request fields that select a KV cache: prompts that differ in one of them share no cached prefix."""

    def content_format(self, chat_template: str) -> ContentFormat:
        """Whether the engine passes message content to this template as one string or as a list of parts."""

    def chat_input(self, body: dict[str, Any], expects: ContentFormat) -> ChatInput:
        """The arguments with which the engine renders its chat template for this request.

        Raises KeyError, TypeError or ValueError if the engine will refuse the request.
        """

    def chat_of_messages(self, body: dict[str, Any], chat_template: str) -> dict[str, Any]:
        """The chat request to which the engine converts a request of Anthropic's Messages API.

        Raises KeyError, TypeError, AttributeError or ValueError if the engine will refuse the request.
        """

    def chat_of_responses(self, body: dict[str, Any], chat_template: str) -> dict[str, Any]:
        """The chat request to which the engine converts a request of OpenAI's Responses API, without history.

        Raises KeyError, TypeError, AttributeError or ValueError if the engine will refuse the request, or does not
        convert requests for this model.
        """


def read_usage(document: bytes, answer_format: AnswerFormat) -> Usage | None:
    """The usage in the bytes of an answer or stream event, or None if they are not JSON or report none."""
    try:
        parsed = orjson.loads(document)
    except orjson.JSONDecodeError:
        return None
    return answer_format.usage_of(parsed)


def total(counts: Sequence[int | None]) -> int | None:
    """The sum of counts; None if one of them is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def total_usage(usages: Sequence[Usage]) -> Usage:
    """The sums over several answers. A sum is None if the engine has not reported the count for one of them."""
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=total([usage.cached_tokens for usage in usages]),
        fetched_tokens=total([usage.fetched_tokens for usage in usages]),
        several=True,
    )


def token_count(value: Any) -> int | None:
    """`value` if it is a valid token count (an integer from 0 to MAX_TOKENS), else None."""
    valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS
    return value if valid else None


def text_or_none(value: Any) -> str | None:
    """`value` if it is a string, else None."""
    return value if isinstance(value, str) else None
