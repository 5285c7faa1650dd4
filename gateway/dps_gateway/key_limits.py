"""The limits of each API key: requests in flight, requests per minute, and tokens per minute.

They apply to all workers of a gateway replica together.
"""

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from dps_gateway.auth import Key
from dps_gateway.shared_counts import NAME_BYTES, SharedCounts

MINUTE_SECONDS: Final = 60.0

_ROUNDING_SECONDS: Final = 0.001

Kind = str
"""What is counted per minute: `requests` or `tokens`."""


class KeyBusy(Exception):
    """The API key has reached its limit of requests in flight."""


class KeyExhausted(Exception):
    """The API key has reached a limit per minute."""

    def __init__(self, limit: str, retry_after_seconds: int) -> None:
        super().__init__(f"the API key may use at most {limit} per minute")
        self.retry_after_seconds = retry_after_seconds


class KeyLimits:
    """Counts what each API key uses.

    `shared` and `minutes` contain the requests in flight and the use per minute in the other workers, if there are any.
    """

    def __init__(
        self,
        shared: SharedCounts | None = None,
        minutes: SharedCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`, in seconds, is the same for all workers."""
        self._shared = shared
        self._in_flight: Counter[bytes] = Counter()
        self._minutes = _Minutes(minutes, clock)

    def enter(self, key: Key) -> None:
        """Count a request, which is in flight until `leave` is called.

        Raises KeyBusy or KeyExhausted if the key has reached a limit; the request then does not count.
        """
        self._add(key, 1)  # first, so that two workers cannot both take the last slot
        try:
            self._check(key)
        except (KeyBusy, KeyExhausted):
            self._add(key, -1)
            raise

    def leave(self, key: Key, tokens: int = 0) -> None:
        """Stop counting a request as in flight, and count the tokens that it used."""
        self._add(key, -1)
        if key.tokens_per_minute is not None:
            self._minutes.add(key, "tokens", tokens)

    def _check(self, key: Key) -> None:
        limit = key.max_in_flight
        if limit is not None and self._in_flight[key.digest] + self._in_others(key) > limit:
            raise KeyBusy(f"the API key may have at most {limit} requests in flight")
        for kind, per_minute in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            if per_minute is not None and (wait := self._minutes.wait_seconds(key, kind, per_minute)):
                raise KeyExhausted(f"{per_minute} {kind}", wait)
        if key.requests_per_minute is not None:
            self._minutes.add(key, "requests", 1)

    def _add(self, key: Key, change: int) -> None:
        self._in_flight[key.digest] += change
        if self._shared is not None:
            self._shared.publish(key.digest[:NAME_BYTES], self._in_flight[key.digest])
        if not self._in_flight[key.digest]:
            del self._in_flight[key.digest]

    def _in_others(self, key: Key) -> int:
        return self._shared.of_others(key.digest[:NAME_BYTES]) if self._shared is not None else 0


class _Minutes:
    """What each key has used in the last minute.

    It is a sliding-window estimate from two counters: the use in the current minute of the clock, plus the previous
    minute's use times the share of that minute that is less than 60 s ago.
    """

    def __init__(self, shared: SharedCounts | None, clock: Callable[[], float]) -> None:
        self._shared = shared
        self._clock = clock
        self._minute = 0
        """The current minute, or an earlier one if nothing has been counted since."""
        self._used: Counter[tuple[int, bytes, Kind]] = Counter()
        """What this worker has counted, by minute, key and kind."""

    def add(self, key: Key, kind: Kind, amount: int) -> None:
        """Count what a key uses now."""
        minute = self._now()[0]
        entry = (minute, key.digest, kind)
        self._used[entry] += amount
        self._publish(entry)

    def wait_seconds(self, key: Key, kind: Kind, limit: int) -> int:
        """The seconds until a key has used less than `limit` within a minute. 0 if it has not used more now."""
        minute, fraction = self._now()
        used, before = (self._all(each, key, kind) for each in (minute, minute - 1))
        if used + before * (1 - fraction) < limit:
            return 0
        # Later in this minute, when enough of the previous one is more than a minute ago, or else in the next minute.
        part = 1 - (limit - used) / before if used < limit else 2 - limit / used
        return math.floor((part - fraction) * MINUTE_SECONDS + _ROUNDING_SECONDS) + 1

    def _all(self, minute: int, key: Key, kind: Kind) -> int:
        entry = (minute, key.digest, kind)
        return self._used[entry] + (self._shared.of_others(_name(entry)) if self._shared is not None else 0)

    def _now(self) -> tuple[int, float]:
        """The current minute, and the fraction of it that has passed. Older minutes than the previous are forgotten."""
        fraction, minute = math.modf(self._clock() / MINUTE_SECONDS)
        if minute != self._minute:
            self._minute = int(minute)
            for entry in [each for each in self._used if each[0] < self._minute - 1]:
                del self._used[entry]
                self._publish(entry)
        return self._minute, fraction

    def _publish(self, entry: tuple[int, bytes, Kind]) -> None:
        if self._shared is not None:
            self._shared.publish(_name(entry), self._used[entry])


def _name(entry: tuple[int, bytes, Kind]) -> bytes:
    minute, digest, kind = entry
    return hashlib.blake2b(f"{kind}/{minute}/".encode() + digest, digest_size=NAME_BYTES).digest()
