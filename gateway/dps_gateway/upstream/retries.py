"""Decides whether a failed request is sent again, and to which replicas."""

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Final

import xxhash

from dps_gateway.pool import Pool
from dps_gateway.upstream.exchange import UpstreamFailed

MAX_FATAL: Final = 2
"""The number of replicas that may crash, break off their answer or stop responding on a request before it fails. Some
requests crash SGLang (an assertion fails); without this limit, one such request could crash every replica."""

FATAL_SECONDS: Final = 60.0
"""Time for which the replicas that crashed on a request are remembered. Clients usually repeat a failed request within
seconds. The time is short, because a request may only have been on two replicas when they crashed for another reason.
"""

MAX_REMEMBERED: Final = 1024
"""The maximum number of requests whose replicas are remembered."""

MAX_REJECTED_PER_POOL: Final = 2
MAX_REJECTED: Final = 3
"""Maximum number of rejected attempts (429, 502, 503, 504) per request: two in the first pool and one in the other."""

RETRY_RATIO: Final = 0.2
RETRY_BURST: Final = 10.0


class RetryBudget:
    """Bounds retries to a fraction of all requests, as in Finagle and Linkerd.

    Overloaded engines reject many requests. Sending each of them again would multiply the load.
    """

    def __init__(self) -> None:
        self._balance = RETRY_BURST

    def deposit(self) -> None:
        """Record a new request."""
        self._balance = min(RETRY_BURST, self._balance + RETRY_RATIO)

    def withdraw(self) -> bool:
        """Whether the budget allows one more retry, which is deducted."""
        if self._balance < 1:
            return False
        self._balance -= 1
        return True


class FatalRequests:
    """The replicas that have recently crashed, or stopped responding, on each request with a body."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: OrderedDict[bytes, tuple[float, frozenset[str]]] = OrderedDict()
        """The time of the last failure and the replicas' base URLs, by the digest of the request."""

    def replicas(self, path: str, body: bytes | None) -> frozenset[str]:
        """The base URLs of the replicas that have failed on this request."""
        if not self._replicas or body is None:
            return frozenset()
        at, replicas = self._replicas.get(_digest(path, body), (-FATAL_SECONDS, frozenset()))
        return replicas if self._clock() < at + FATAL_SECONDS else frozenset()

    def add(self, path: str, body: bytes | None, url: str) -> None:
        """Record that the replica with this base URL has failed on a request."""
        if body is None:  # many clients send such a request
            return
        digest = _digest(path, body)
        self._replicas[digest] = self._clock(), self.replicas(path, body) | {url}
        self._replicas.move_to_end(digest)
        if len(self._replicas) > MAX_REMEMBERED:
            self._replicas.popitem(last=False)

    def forget(self, path: str, body: bytes | None) -> None:
        """Record that a replica has answered a request. Those that failed on it crashed for another reason."""
        if self._replicas and body is not None:
            self._replicas.pop(_digest(path, body), None)


class Retries:
    """The failed attempts of one request.

    A replica that cannot be reached, or that has crashed, has not answered; the request is sent to another one. A
    replica that has rejected the request may be overloaded; retries are few, and limited by the retry budget. So are
    those after a replica that broke off its answer, or stopped responding before it answered ("lost"). After a timeout
    the replica may still be executing the request. A streaming request is sent once more. A non-streaming request may
    legitimately take long, so it is not executed a second time. Neither is a request whose answer is longer than the
    gateway buffers, because any replica would give such an answer.
    """

    def __init__(self, budget: RetryBudget, *, streamed: bool, fatal: frozenset[str] = frozenset()) -> None:
        """fatal: the base URLs of replicas that have crashed on the same request before."""
        self._budget = budget
        self._streamed = streamed
        self._failed: defaultdict[Pool, set[str]] = defaultdict(set)
        self._disconnected: set[str] = set()
        self._fatal = set(fatal)
        """The replicas that have crashed, broken off their answer or stopped responding."""
        self._rejected: Counter[Pool] = Counter()
        self._kinds: Counter[str] = Counter()
        """The number of failures of each kind."""
        budget.deposit()

    def avoids(self, pool: Pool, url: str) -> bool:
        """Whether the replica of `pool` with this base URL is not to be tried again."""
        return url in self._failed[pool]

    def may_stay(self, pool: Pool) -> bool:
        """Whether another replica of the same pool may be tried."""
        return self._rejected[pool] < MAX_REJECTED_PER_POOL

    @property
    def fatal(self) -> bool:
        """Whether the request is not sent to another replica, because it may crash that one as well."""
        return len(self._fatal) >= MAX_FATAL

    @property
    def fresh_connection(self) -> bool:
        """Whether to bypass pooled connections: a crashed engine leaves stale connections behind."""
        return bool(self._disconnected)

    def record(self, pool: Pool, url: str, failure: UpstreamFailed) -> bool:
        """Record a failed attempt. Returns whether the replica is down: it cannot be reached, or has crashed.

        The first disconnect of a replica may only mean that the engine closed an idle connection, so the same replica
        is tried once more, on a fresh connection.
        """
        if failure.fatal:
            self._fatal.add(url)
        if failure.kind == "disconnect" and url not in self._disconnected:
            self._disconnected.add(url)
            return len(self._disconnected) >= MAX_FATAL
        self._failed[pool].add(url)
        self._rejected[pool] += failure.rejected
        self._kinds[failure.kind] += 1
        return failure.kind in ("connect", "disconnect", "broken")

    def allowed_after_start(self, failure: UpstreamFailed) -> bool:
        """Whether a streaming request may be sent again after the failure recorded last, which ended its answer.

        Unlike other retries, those after a closed connection are not limited by the retry budget: an engine that
        crashes ends all its streams at once, and no longer generates them.
        """
        return not self.fatal if failure.kind == "broken" else self.allowed_after(failure)

    def allowed_after(self, failure: UpstreamFailed) -> bool:
        """Whether the request may be sent again after the failure recorded last; if so, counts it as a retry."""
        if failure.rejected:
            return self._rejected.total() < MAX_REJECTED and self._budget.withdraw()
        if failure.kind == "timeout":
            return self._streamed and self._kinds["timeout"] == 1 and self._budget.withdraw()
        if failure.kind in ("broken", "lost", "aborted"):
            return len(self._fatal) + self._kinds["aborted"] < MAX_FATAL and self._budget.withdraw()
        if failure.kind == "too_long":
            return False
        return failure.kind != "disconnect" or not self.fatal


def _digest(path: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(path.encode() + b" " + body)
