"""A session's record as a JSON document, for `dps session` and the admin port. This module performs no I/O."""

from typing import Any

from dps_gateway.session.identity import SessionId
from dps_gateway.session.record import Record


def session_document(session: SessionId, record: Record, source: str) -> dict[str, Any]:
    """The record. `bytes` is the length of the rendered prompt's prefix that a digest covers."""
    return {
        "session": session.text,
        "source": source,
        "turn": record.turn,
        "points": [
            {
                "turn": point.turn,
                "promptTokens": point.length,
                "digest": point.digest,
                "bytes": point.offset,
                "holders": [{"pool": pool, "replica": replica} for pool, replica in point.holders],
                "shared": point.shared,
            }
            for point in record.points
        ],
    }
