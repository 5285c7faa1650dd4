"""Records of replayed turns, for tests of what is done with them."""

from typing import Any

from dps_lab.replay.records import TurnRecord, Usage, Verdict

GREEDY = Verdict("greedy", "over_threshold", 100, 100, 1, "new", "redis")


def answered(session: str = "s", turn: int = 1, verdict: Verdict = GREEDY, **changes: Any) -> TurnRecord:
    """A turn that was answered at the first attempt."""
    values: dict[str, Any] = {
        "url": "http://a/v1",
        "status": 200,
        "attempts": 1,
        "unacknowledged": 0,
        "started": 0.0,
        "ttft": 0.5,
        "latency": 1.0,
        "usage": Usage(prompt_tokens=100, completion_tokens=10, cached_tokens=25),
    }
    return TurnRecord(session=session, turn=turn, verdict=verdict, **(values | changes))
