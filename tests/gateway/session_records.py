"""Points and records of a session whose prompts grow by 100 tokens in each turn."""

from dps_gateway.pool import Pool
from dps_gateway.session.record import CachedOn, Point, Record

SPECULATIVE, GREEDY = CachedOn(Pool.SPECULATIVE, "spec"), CachedOn(Pool.GREEDY, "gree")


def point(turn: int, length: int | None = None, holder: CachedOn = GREEDY, digest: str = "") -> Point:
    """The point of a turn whose prompt is 100 tokens longer than the previous one's, or has this length."""
    length = 100 * turn if length is None else length
    return Point(turn, digest or f"d{turn}", 4 * length, length - 3, length, (holder,))


def record(*points: Point) -> Record:
    """A record to which the points were added in this order."""
    result = Record(())
    for each in points:
        result = result.with_point(each)
    return result
