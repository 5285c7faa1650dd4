"""What the events of a stream contain, so that two answers to the same request can be compared.

Only the answers of deterministic requests can be compared. This module performs no I/O.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple


class Different(Exception):
    """Two answers differ, or have events that cannot be compared."""


class Part(NamedTuple):
    """A part of what an event contains."""

    field: str
    """What the text belongs to, such as the content or the arguments of a tool call. The texts of consecutive parts
    with the same field belong together, because engines divide the same text differently among events."""
    text: str
    """Not empty."""
    cut: Callable[[str], None]
    """Replaces the text in the event by its last characters, or removes it."""
    whole: bool = False
    """Whether the text is never divided among events."""


Reader = Callable[[dict[str, Any]], Iterator[Part]]
"""Yields the parts of the next event of a stream. Raises Different if the event cannot be compared."""


@dataclass(frozen=True, slots=True)
class StreamContent:
    """How to compare the streams of an endpoint."""

    deterministic: Callable[[Mapping[str, Any]], bool]
    """Whether all engines generate the same answer to a request with this body."""
    reader: Callable[[], Reader]
    """Returns the reader of a new stream."""
    identified: Callable[[dict[str, Any]], dict[str, Any]]
    """The part of an event with the fields `id` and `created` of the answer, if it has any."""


def _is_greedy(sampling: Mapping[str, Any]) -> bool:
    """Whether the most probable token is always selected, for one answer."""
    one = sampling.get("n") in (None, 1)
    return one and (sampling.get("temperature") == 0 or sampling.get("top_k") == 1)


def _is_deterministic(body: Mapping[str, Any]) -> bool:
    logprobs = body.get("logprobs")
    return _is_greedy(body) and (
        logprobs is None or logprobs is False
    )  # 0 requests those of the generated tokens


def _is_deterministic_in_generate(body: Mapping[str, Any]) -> bool:
    sampling = body.get("sampling_params")
    return isinstance(sampling, dict) and _is_greedy(sampling) and not body.get("return_logprob")


def _unchanged(_rest: str) -> None:
    """The `cut` of parts that need none.

    Nothing follows them in their event or, in /generate, each event repeats the whole text.
    """


def _text(owner: dict[str, Any], field: str, *names: str) -> Iterator[Part]:
    """The text of an event, if there is any. Several of the fields `names` may have it, if it is the same in all."""
    found = [name for name in names if owner.get(name)]
    if not found:
        return
    text = owner[found[0]]
    if not isinstance(text, str) or any(owner[name] != text for name in found):
        raise Different(f"{field} is not one string")

    def cut(rest: str) -> None:
        owner.update(dict.fromkeys(found, rest))

    yield Part(field, text, cut)


def _whole(field: str, value: Any) -> Iterator[Part]:
    """A value that is sent once, if there is one."""
    if value is not None:
        yield Part(field, str(value), _unchanged, whole=True)


_CHOICE_FIELDS: Final = frozenset({"index", "delta", "text", "finish_reason", "matched_stop", "stop_reason"})
_REASONING_FIELDS: Final = ("reasoning_content", "reasoning")
"""The fields with the reasoning in a delta: SGLang's and vLLM's. vLLM 0.12 sends the same text in both."""
_DELTA_FIELDS: Final = frozenset({"role", "content", "tool_calls", *_REASONING_FIELDS})


def _choice(event: dict[str, Any]) -> dict[str, Any] | None:
    """The only choice of an event; None if it has none."""
    choices = event.get("choices")
    if choices == []:
        return None
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict):
        choice: dict[str, Any] = choices[0]
        if choice.get("index") == 0:
            _refuse_others(choice, _CHOICE_FIELDS)
            return choice
    raise Different("an event has other choices than the first")


def _refuse_others(owner: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise Different if a field with a value is not known, because its value would be lost or sent twice."""
    for name, value in owner.items():
        if value and name not in known:
            raise Different(f"an event has the field {name}, which cannot be compared")


def _without_choices(event: dict[str, Any]) -> Iterator[Part]:
    """The parts of an event after the answer: usage, or the sources of cached tokens."""
    for name in ("sglext", "usage"):
        yield from _whole(name, "sent" if event.get(name) else None)


def _chat(event: dict[str, Any]) -> Iterator[Part]:
    choice = _choice(event)
    if choice is None:
        yield from _without_choices(event)
        return
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        raise Different("an event has no delta")
    _refuse_others(delta, _DELTA_FIELDS)
    yield from _text(delta, "reasoning", *_REASONING_FIELDS)
    yield from _text(delta, "content", "content")
    calls = delta.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Different("the tool calls are not a list")
    for call in calls:
        yield from _tool_call(call)
    yield from _whole("finish_reason", choice.get("finish_reason"))


def _tool_call(call: Any) -> Iterator[Part]:
    """The name and the arguments of a tool call. Its id differs between answers, and is sent with the name."""
    match call:
        case {"index": int(index), "function": dict(function)}:
            name = function.get("name")
            if name:

                def remove_name(_rest: str) -> None:
                    call["id"] = function["name"] = None

                yield Part(f"name of tool call {index}", str(name), remove_name, whole=True)
            yield from _text(function, f"arguments of tool call {index}", "arguments")
        case _:
            raise Different("a tool call has no index or no function")


def _completion(event: dict[str, Any]) -> Iterator[Part]:
    choice = _choice(event)
    if choice is None:
        yield from _without_choices(event)
        return
    yield from _text(choice, "text", "text")
    yield from _whole("finish_reason", choice.get("finish_reason"))


_DELTAS: Final = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
"""The deltas of content blocks in Anthropic's Messages API, and the field that contains their text."""


def _message(event: dict[str, Any]) -> Iterator[Part]:
    match event:
        case {"type": "ping"}:
            pass
        case {"type": "message_start"}:
            yield from _whole("message", "start")
        case {"type": "content_block_start", "index": index, "content_block": {"type": kind, **block}}:
            yield from _whole(f"start of block {index}", f"{kind} {block.get('name')}")
        case {"type": "content_block_delta", "index": index, "delta": {"type": str(kind)} as delta} if (
            kind in _DELTAS
        ):
            yield from _text(delta, f"{kind} of block {index}", _DELTAS[kind])
        case {"type": "content_block_stop", "index": index}:
            yield from _whole(f"stop of block {index}", "stop")
        case {"type": "message_delta", "delta": {"stop_reason": reason}}:
            yield from _whole("stop_reason", reason)
        case _:
            raise Different(f"an event of type {event.get('type')} cannot be compared")


class _GenerateReader:
    """Reads the events of /generate, each of which contains the whole text so far.

    With SGLang's option --incremental-streaming-output they contain only new text, and cannot be compared.
    """

    def __init__(self) -> None:
        self._before = ""

    def __call__(self, event: dict[str, Any]) -> Iterator[Part]:
        match event:
            case {
                "text": str(text),
                "output_ids": list(ids),
                "meta_info": {"completion_tokens": int(tokens), "finish_reason": reason},
            } if len(ids) >= tokens and text.startswith(self._before) and "index" not in event:
                new = text[len(self._before) :]
                self._before = text
                if new:
                    yield Part("text", new, _unchanged)
                yield from _whole("finish_reason", reason.get("type") if isinstance(reason, dict) else reason)
            case _:
                raise Different("an event does not continue the text of those before it")


def _meta_info(event: dict[str, Any]) -> dict[str, Any]:
    info = event.get("meta_info")
    return info if isinstance(info, dict) else {}


CHAT_STREAMS: Final = StreamContent(_is_deterministic, lambda: _chat, lambda event: event)
COMPLETION_STREAMS: Final = StreamContent(_is_deterministic, lambda: _completion, lambda event: event)
MESSAGE_STREAMS: Final = StreamContent(_is_deterministic, lambda: _message, lambda event: {})
"""Of Anthropic's Messages API, in which only the first event has an id."""
GENERATE_STREAMS: Final = StreamContent(_is_deterministic_in_generate, _GenerateReader, _meta_info)
