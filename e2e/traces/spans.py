"""Spans as a tracing backend gives them back, put together to the tree that they are. Pure."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_OURS = ("dps.", "error.", "gen_ai.", "http.", "server.")
"""What gateway and SGLang say; what Phoenix makes of it (`llm.*`, `session.id`) is its own business."""
_TIMES = ("gen_ai.latency.", "gen_ai.response.time_to_first_chunk")
_CHANGING = re.compile(r"(?<=^Req ).*|(?<=^Tokenizer).*|(?<=^Scheduler).*")


@dataclass(frozen=True)
class Span:
    """One span. `started`: an ISO 8601 time."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    started: str
    attributes: Mapping[str, Any]

    def said(self) -> dict[str, Any]:
        """What it says but for times, which nobody can know beforehand."""
        return {
            name: value
            for name, value in self.attributes.items()
            if name.startswith(_OURS) and not name.startswith(_TIMES)
        }


@dataclass(frozen=True)
class Node:
    """A span with what it says and the spans under it, in the order of their beginnings."""

    name: str
    said: dict[str, Any] = field(default_factory=dict)
    children: tuple["Node", ...] = ()


def tree(spans: Iterable[Span]) -> tuple[Node, ...]:
    """The spans that have no parent among these, each with all that is under it.

    Of SGLang's names that carry a request's or a process's id only the beginning is kept.
    """
    ordered = sorted(spans, key=lambda span: span.started)
    known = {span.span_id for span in ordered}

    def under(parent: str | None) -> tuple[Node, ...]:
        return tuple(
            Node(_CHANGING.sub("", span.name.strip()).strip(), span.said(), under(span.span_id))
            for span in ordered
            if (span.parent_id if span.parent_id in known else None) == parent
        )

    return under(None)
