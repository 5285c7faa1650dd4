"""Spans as returned by a tracing backend, and the tree that they form. This module performs no I/O."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_OURS = ("dps.", "error.", "gen_ai.", "http.", "server.")
"""Attributes set by the gateway and SGLang; Phoenix derives others, such as `llm.*` and `session.id`."""
_TIMES = ("gen_ai.latency.", "gen_ai.response.time_to_first_chunk")
_CHANGING = re.compile(r"(?<=^Req ).*|(?<=^Tokenizer).*|(?<=^Scheduler).*")


@dataclass(frozen=True)
class Span:
    """One span. started: time in ISO 8601 format."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str | None
    started: str
    attributes: Mapping[str, Any]

    def stable_attributes(self) -> dict[str, Any]:
        """The attributes set by the gateway and SGLang, except for durations."""
        return {
            name: value
            for name, value in self.attributes.items()
            if name.startswith(_OURS) and not name.startswith(_TIMES)
        }


@dataclass(frozen=True)
class Node:
    """A span with its stable attributes and its child spans, ordered by start time."""

    name: str
    attributes: dict[str, Any] = field(default_factory=dict)
    children: tuple["Node", ...] = ()


def tree(spans: Iterable[Span]) -> tuple[Node, ...]:
    """The spans whose parent is not among `spans`, each with its descendants.

    Request and process ids are removed from the names of SGLang's spans.
    """
    ordered = sorted(spans, key=lambda span: span.started)
    known = {span.span_id for span in ordered}

    def under(parent: str | None) -> tuple[Node, ...]:
        return tuple(
            Node(_CHANGING.sub("", span.name.strip()).strip(), span.stable_attributes(), under(span.span_id))
            for span in ordered
            if (span.parent_id if span.parent_id in known else None) == parent
        )

    return under(None)
