"""What API keys and tenants may use: requests, tokens, and memory for bodies. Limits apply to each gateway replica."""

import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from dps_gateway.auth import Key
from dps_gateway.config import Limits

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

    The use within a minute is a sliding-window estimate from two counters: the use in the current minute of the clock,
    plus the previous minute's use times the share of that minute that is less than 60 s ago.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._in_flight: Counter[bytes] = Counter()
        self._minute = 0
        """The current minute, or an earlier one if nothing has been counted since."""
        self._used: Counter[tuple[int, bytes, Kind]] = Counter()
        """What has been counted, by minute, key and kind."""

    def enter(self, key: Key) -> None:
        """Count a request, which is in flight until `leave` is called.

        Raises KeyBusy or KeyExhausted if the key has reached a limit; the request then does not count.
        """
        limit = key.max_in_flight
        if limit is not None and self._in_flight[key.digest] >= limit:
            raise KeyBusy(f"the API key may have at most {limit} requests in flight")
        for kind, per_minute in (("requests", key.requests_per_minute), ("tokens", key.tokens_per_minute)):
            if per_minute is not None and (wait := self._wait_seconds(key, kind, per_minute)):
                raise KeyExhausted(f"{per_minute} {kind}", wait)
        self._in_flight[key.digest] += 1
        if key.requests_per_minute is not None:
            self._used[self._now()[0], key.digest, "requests"] += 1

    def leave(self, key: Key, tokens: int = 0) -> None:
        """Stop counting a request as in flight, and count the tokens that it used."""
        self._in_flight[key.digest] -= 1
        if not self._in_flight[key.digest]:
            del self._in_flight[key.digest]
        if key.tokens_per_minute is not None:
            self._used[self._now()[0], key.digest, "tokens"] += tokens

    def _wait_seconds(self, key: Key, kind: Kind, limit: int) -> int:
        """The seconds until a key has used less than `limit` within a minute. 0 if it has not used more now."""
        minute, fraction = self._now()
        used, before = (self._used[each, key.digest, kind] for each in (minute, minute - 1))
        if used + before * (1 - fraction) < limit:
            return 0
        # Later in this minute, when enough of the previous one is more than a minute ago, or else in the next minute.
        part = 1 - (limit - used) / before if used < limit else 2 - limit / used
        return math.floor((part - fraction) * MINUTE_SECONDS + _ROUNDING_SECONDS) + 1

    def _now(self) -> tuple[int, float]:
        """The current minute, and the fraction of it that has passed. Older minutes than the previous are forgotten."""
        fraction, minute = math.modf(self._clock() / MINUTE_SECONDS)
        if minute != self._minute:
            self._minute = int(minute)
            for entry in [each for each in self._used if each[0] < self._minute - 1]:
                del self._used[entry]
        return self._minute, fraction


class BodyBudget:
    """Counts the bytes of the bodies that this process holds, up to limits.maxBufferedBytes.

    That limit is at least limits.maxBodyBytes. If there are several tenants, one of them holds at most as many bytes as
    it leaves free, or one body of the maximum size (Choudhury and Hahne: Dynamic Queue Length Thresholds for
    Shared-Memory Packet Switches, 1998). Of two tenants that send as much as they can, each therefore holds a third,
    and the last third remains for others.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        """The bytes that are reserved, by tenant."""
        self.used = 0
        """The bytes that are reserved."""

    def reserve(self, tenant: str, size: int, limits: Limits, *, shared: bool) -> bool:
        """Reserve `size` bytes for a tenant until they are released. Returns whether there was room for them.

        shared: whether there are several tenants.
        """
        free = max(limits.max_buffered_bytes, limits.max_body_bytes) - self.used - size
        if free < 0 or (shared and self._held[tenant] + size > max(free, limits.max_body_bytes)):
            return False
        self.used += size
        self._held[tenant] += size
        return True

    def release(self, tenant: str, size: int) -> None:
        """Release bytes that have been reserved."""
        self.used -= size
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
