"""The time in which a request must be answered. This module performs no I/O; it reads a clock."""

import time
from dataclasses import dataclass
from typing import Final, Self

TIMER_SECONDS: Final = 0.02
"""A timer may fire this much early, in seconds.

The timers of uvloop count whole milliseconds from the beginning of the loop's iteration.
"""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of the time in which all attempts of a request together must be answered."""

    seconds: float
    """The time limit, from the request's arrival if the client has set it."""
    at: float
    """When it ends (`time.monotonic()`)."""
    of_client: bool
    """Whether the client has set the limit."""

    @classmethod
    def of(cls, total_seconds: float, client_seconds: float | None, elapsed_seconds: float) -> Self:
        """timeouts.totalSeconds, or what is left of the time that the client allows if it is shorter.

        elapsed_seconds: the time since the request's arrival.
        """
        now = time.monotonic()
        if client_seconds is None or client_seconds - elapsed_seconds > total_seconds:
            return cls(total_seconds, now + total_seconds, of_client=False)
        return cls(client_seconds, now + client_seconds - elapsed_seconds, of_client=True)

    @property
    def left_seconds(self) -> float:
        """The time until it ends; 0 if it has ended."""
        return max(0.0, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether it has ended."""
        return time.monotonic() >= self.at

    @property
    def over(self) -> bool:
        """Whether it has ended, or a timer for its end may have fired."""
        return self.left_seconds <= TIMER_SECONDS

    @property
    def passed_for_client(self) -> bool:
        """Whether the client's time is over, or a timer for its end may have fired."""
        return self.of_client and self.over
