"""The part of an answer that belongs to the contract: status, headers, shape and the values set by the request.

A shape is the answer's JSON with placeholders `"<str>"`, `"<int>"` and `"<float>"` for values that depend on
time, chance or the model. Consecutive equal shapes (list items, stream events) are written once.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Shape = Any
"""JSON with placeholders for values."""

COUNTS = frozenset(
    {"prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens", "reasoning_tokens"}
)
DETERMINED = COUNTS | {
    "object", "role", "index", "type", "code", "param", "model", "matched_stop", "finish_reason", "length",
    "success", "error", "detail", "weight_version", "max_model_len", "message",
    "event", "stop_reason", "input_tokens", "output_tokens", "cache_read_input_tokens",
    "status", "reason", "store", "max_output_tokens",
}  # fmt: skip
FREE_HEADERS = frozenset(
    {"date", "content-length", "server", "connection", "keep-alive", "transfer-encoding"}
)
FRAME = re.compile(rb"(?:event: ([\w.]+)\n)?data: (.*)")
VALIDATION = re.compile(r"\d+ validation error|\[\{'type'|.*Expecting|.*JSON decode", re.DOTALL)


@dataclass(frozen=True)
class Answer:
    """A complete answer; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def describe(answer: Answer) -> dict[str, Shape]:
    """The part of an answer that must be equal on both servers."""
    headers = {name: value for name, value in sorted(answer.headers.items()) if name not in FREE_HEADERS}
    described: dict[str, Shape] = {"status": answer.status, "headers": headers}
    if headers.get("content-type", "").startswith("text/event-stream"):
        return described | {"events": stream(answer.body)}
    try:
        return described | {"json": shape(json.loads(answer.body))}
    except ValueError:
        return described | {"text": answer.body.decode() if len(answer.body) < 200 else "<str>"}


def stream(body: bytes) -> list[Shape]:
    """Shapes of a stream's events, sorted by choice. Raises ValueError if the framing differs from SGLang's."""
    *frames, rest = body.split(b"\n\n")
    matches = [match for frame in frames if (match := FRAME.fullmatch(frame))]
    if rest or len(matches) < len(frames):
        raise ValueError(f"not framed as server-sent events of one data line: {body[:200]!r}")
    events = [_parsed(*match.groups()) for match in matches]
    return runs([_event(event) for event in sorted(events, key=_choice)])


def metrics(exposition: str) -> dict[str, Shape]:
    """Type and label names of every SGLang metric that has a value, from Prometheus text."""
    return {
        family.name: {
            "type": family.type,
            "labels": sorted({label for s in family.samples for label in s.labels}),
        }
        for family in sorted(text_string_to_metric_families(exposition), key=lambda family: family.name)
        if family.name.startswith("sglang:") and family.samples
    }


def shape(value: Any, key: str = "", settled: bool = True) -> Shape:
    """The shape of a value. `settled` is false for counts that still grow during a stream."""
    match value:
        case dict():
            return {name: shape(item, name, settled) for name, item in value.items()}
        case list():
            return runs([shape(item, key, settled) for item in value])
        case None | bool() | "":
            return value
        case str() if key == "message" and VALIDATION.match(value):
            return "<str>"
        case _ if key in DETERMINED and (settled or key not in COUNTS):
            return value
        case _:
            return f"<{type(value).__name__}>"


def _parsed(name: bytes | None, data: bytes) -> Any:
    """An event's data, with the event's name if it has one."""
    if data == b"[DONE]":
        return "[DONE]"
    return json.loads(data) if name is None else {"event": name.decode()} | json.loads(data)


def _event(event: Any) -> Shape:
    if not isinstance(event, dict):
        return event
    choices = event.get("choices") or [event.get("meta_info", {})]
    growing = event.get("choices") != [] and all(choice.get("finish_reason") is None for choice in choices)
    return shape(event, settled=not growing)


def _choice(event: Any) -> tuple[int, int]:
    # The choices of one request are interleaved, so only the order within each choice is defined.
    match event:
        case {"event": _}:  # named events belong to a single choice
            return 0, 0
        case {"choices": [{"index": int(index)}, *_]} | {"index": int(index)}:
            return 0, index
        case {"meta_info": _}:
            return 0, 0
        case _:
            return 1, 0


def runs(shapes: list[Shape]) -> list[Shape]:
    """The shapes without those that are equal to the one before."""
    return [item for item, _ in groupby(shapes)]
