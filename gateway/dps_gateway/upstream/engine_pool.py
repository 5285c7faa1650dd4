"""One pool of engine replicas: their readiness, their load, and their slots for requests."""

import asyncio
import logging
import math
import ssl
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import xxhash

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import CachedPrompt, PoolView
from dps_gateway.upstream.admission import Accepts, Admission, Slot, SlotRequest, any_replica
from dps_gateway.upstream.replica import LATE_CHECKS_TO_FAIL, Configuration, Replica

log = logging.getLogger(__name__)

SMOOTHING: Final = 0.1
"""Weight of the newest observation in the pool's running means."""

LOAD_FACTOR: Final = 1.25
"""A replica is skipped if one more request would raise its load above this multiple of the pool's mean (rounded up)."""

NOTHING_HELD: Final[Mapping[str, int]] = MappingProxyType({})

MAX_EJECTED_FRACTION: Final = 0.5
"""The maximum fraction of a pool's replicas that is ejected at the same time. If most replicas return errors, the cause
is probably the requests or the load, and fewer replicas would not help."""


class EnginePool:
    """The replicas of one pool, and this process's observations of them.

    Requests that wait for a replica are in the queue of `admission`, which both pools share. Its `assign` is called
    whenever a replica may have become free or unusable.
    """

    def __init__(
        self,
        name: Pool,
        max_in_flight_per_replica: int,
        admission: Admission,
        slow_start_seconds: float = 0.0,
    ) -> None:
        """max_in_flight_per_replica: the maximum number of requests on a replica.
        slow_start_seconds: the time in which the share of a replica that is new, or returns to service, grows to that
        of the others.
        """
        self.name = name
        self.other: EnginePool | None = None
        """The pool that could serve the requests of this one, if any."""
        self.admission = admission
        self.max_in_flight_per_replica = max_in_flight_per_replica
        self.slow_start_seconds = slow_start_seconds
        self.api_key: str | None = None
        self.trust: ssl.SSLContext | bool = True
        """The `ssl` argument of requests to https:// replicas."""
        self.replicas: dict[str, Replica] = {}
        """The replicas that may receive requests when they are ready, by their base URLs."""
        self._leaving: dict[str, Replica] = {}
        """Replicas that have been removed, but still have requests."""
        self._last_reported_limit: int | None = None
        """The last limit of running requests that a replica reported. It is assumed for replicas that have not reported
        theirs yet, so that queued requests do not flood an engine that has just started."""
        self.suspicion = asyncio.Event()
        """Set when a replica is suspected."""
        self.has_answered = False
        """Whether any replica has ever answered, even if it has been removed since."""
        self.time_to_first_token_seconds: float | None = None
        """Running mean of the time to first token of recent streamed answers; None before the first answer."""
        self.time_per_output_token_seconds: float | None = None
        """Running mean of the time per output token of recent streamed answers; None before the first answer."""
        self.tokens_per_event: float | None = None
        """Running mean of the tokens per event of recent streamed answers; None before the first answer."""

    def configure(
        self,
        max_in_flight_per_replica: int,
        api_key: str | None,
        trust: ssl.SSLContext | bool = True,
        slow_start_seconds: float = 0.0,
    ) -> None:
        """Apply new limits, a new API key and new trusted authorities. Requests in flight are unaffected."""
        self.max_in_flight_per_replica = max_in_flight_per_replica
        self.slow_start_seconds = slow_start_seconds
        for replica in self.all_replicas:
            replica.slow_start_seconds = slow_start_seconds
        self.api_key = api_key
        self.trust = trust
        self.admission.assign()

    def set_endpoints(self, urls: Iterable[str]) -> None:
        """Set the replicas' base URLs. Requests on a removed replica are finished there, and count if it returns.

        A replica that joins others begins a slow start.
        """
        before, known = self.replicas, {replica.url: replica for replica in self.all_replicas}
        seconds = self.slow_start_seconds
        self.replicas = {url: known.get(url) or Replica(url, slow_start_seconds=seconds) for url in urls}
        self._leaving = {
            url: replica for url, replica in known.items() if replica.in_flight and url not in self.replicas
        }
        for url in self.replicas.keys() - before.keys() if before else ():
            self.replicas[url].begin_slow_start()
        self.admission.assign()

    @property
    def authorization(self) -> dict[str, str]:
        """The headers that authorize the gateway's own requests to the engines, such as health checks."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @property
    def ready(self) -> list[Replica]:
        """The replicas that may receive requests."""
        return [replica for replica in self.replicas.values() if replica.ready]

    @property
    def all_replicas(self) -> list[Replica]:
        """The pool's replicas, and those that have been removed but still have requests."""
        return [*self.replicas.values(), *self._leaving.values()]

    @property
    def in_flight(self) -> int:
        """Requests in flight on all replicas."""
        return sum(replica.in_flight for replica in self.all_replicas)

    @property
    def queued(self) -> int:
        """Requests that wait for a free replica and prefer this pool."""
        return self.admission.preferring[self]

    def has_room(self, generates: bool = True) -> bool:
        """Whether a request would be sent without waiting. `generates` is described at `SlotRequest`."""
        return any(replica.in_flight < self.slots(replica, generates) for replica in self.ready)

    def slots(self, replica: Replica, generates: bool = True) -> int:
        """The number of requests that this process may have on a replica at the same time: one while it is probed.

        More than the engine runs would wait in its own queue, which is neither fair nor ordered by priority. That limit
        does not apply to requests that do not generate, such as /v1/models.
        """
        if replica.probing:
            return 1
        configuration, limit = replica.configuration, self.max_in_flight_per_replica
        running = self._last_reported_limit if configuration is None else configuration.max_running
        return min(limit, running) if running is not None and generates else limit

    def view(self, session: str | None, prompt: CachedPrompt) -> PoolView | None:
        """The pool's state for one turn: that of the replica that would serve it. None if no replica is ready."""
        ready = self.ready
        if not ready:
            return None
        replica = self.choose(session, prompt.held) or min(ready, key=lambda each: each.in_flight)
        other = replica.other_load
        queued_prefill_tokens = replica.prefill_tokens + other.waiting_tokens
        free = replica.free_tokens
        return PoolView(
            ready_replicas=len(ready),
            in_flight=replica.in_flight + other.running,
            queued=other.waiting + self.queued / len(ready),
            queued_prefill_tokens=queued_prefill_tokens,
            free_tokens=math.inf if free is None else free - queued_prefill_tokens,
            running_limit=replica.limit,
            replica=replica.id,
            prompt=prompt.tokens(replica.id, replica.units),
        )

    def release(self, replica: Replica) -> None:
        """End a request on `replica`. Its slot is assigned to the next request in the queue."""
        replica.in_flight -= 1
        if not replica.in_flight:
            self._leaving.pop(replica.url, None)
        self.admission.assign(only_free=True)

    def mark_available(self, replica: Replica) -> None:
        """Record a successful health check."""
        self.has_answered = True
        replica.answered()
        self.admission.assign(only_free=True)

    def record_configuration(self, replica: Replica, configuration: Configuration) -> None:
        """Record what the engine reports about its configuration."""
        replica.configuration = configuration
        self._last_reported_limit = configuration.max_running or self._last_reported_limit
        self.admission.assign()

    def record_late_check(self, replica: Replica) -> None:
        """Record a health check that was not answered in time. The replica is unavailable after several of them."""
        replica.late_checks += 1
        if replica.late_checks >= LATE_CHECKS_TO_FAIL:
            self.mark_unavailable(replica)
        if replica.lost:
            _give_up(replica)

    def suspect(self, replica: Replica, *, error: bool = True) -> None:
        """Record a failed connection: no more requests until the health check that begins now succeeds.

        It counts as an error, unless it may be due to the request, because the checks of an engine that closes all
        connections may succeed.
        """
        if replica.available:
            replica.available, replica.suspected = False, True
            self.suspicion.set()
            if error:
                self.record_error(replica)
            self.admission.assign()

    def mark_unavailable(self, replica: Replica) -> None:
        """Record a failed health check: no more requests until a health check succeeds."""
        changed = replica.promising
        replica.available = replica.suspected = False
        replica.configuration = None
        if changed:
            self.admission.assign()

    def mark_hung(self, replica: Replica) -> None:
        """Record that a check found the engine's scheduler hung: no more requests until it generates a token."""
        replica.hung = True
        _give_up(replica)
        self.admission.assign()

    def record_token(self, replica: Replica) -> None:
        """Record that the engine has generated a token."""
        changed = replica.hung
        replica.note_token()
        if changed:
            self.admission.assign()

    def record_success(self, replica: Replica) -> None:
        """Record an answer that is not a server error."""
        self.has_answered = True
        changed = replica.probing or not replica.available
        replica.succeeded()
        if changed:
            self.admission.assign()

    def record_error(self, replica: Replica) -> None:
        """Record a 5xx answer or a timeout, and eject the replica after several of them."""
        replica.errored()
        if not (replica.failing and self._may_eject()):
            return
        backoff = replica.eject()
        log.warning(
            "replica %s of the %s pool keeps failing; it is ejected for %.0f s",
            replica.url,
            self.name,
            backoff,
        )
        asyncio.get_running_loop().call_later(backoff, self.admission.assign)
        self.admission.assign()

    def _may_eject(self) -> bool:
        """Whether the pool can do without one more replica. Its only one can be ejected while the other pool serves."""
        if len(self.replicas) == 1:
            return self.other is not None and bool(self.other.ready)
        ejected = sum(each.ejected for each in self.replicas.values())
        return ejected + 1 <= MAX_EJECTED_FRACTION * len(self.replicas)

    def observe(
        self,
        first_token_seconds: float | None,
        per_token_seconds: float | None,
        tokens_per_event: float | None,
    ) -> None:
        """Add an answer to the running means."""
        self.tokens_per_event = _smoothed(self.tokens_per_event, tokens_per_event)
        self.time_to_first_token_seconds = _smoothed(self.time_to_first_token_seconds, first_token_seconds)
        self.time_per_output_token_seconds = _smoothed(self.time_per_output_token_seconds, per_token_seconds)

    def promising(self, accepts: Accepts) -> bool:
        """Whether a replica may receive requests, or may do so soon, as far as `accepts` permits it."""
        return any(each.promising and accepts(self, each) for each in self.replicas.values())

    def usable(self, accepts: Accepts) -> list[Replica]:
        """The replicas that may receive requests, as far as `accepts` permits them."""
        return [replica for replica in self.ready if accepts(self, replica)]

    def take(self, request: SlotRequest) -> Slot | None:
        """A slot on a replica if one is free."""
        chosen, generates = request.chosen.get(self.name), request.generates
        replica = (
            next((each for each in self.replicas.values() if each.id == chosen), None) if chosen else None
        )
        if not (
            replica is not None
            and replica.ready
            and request.accepts(self, replica)
            and replica.in_flight < self.slots(replica, generates)
        ):
            replica = self.choose(request.session, request.held, request.accepts, generates=generates)
        if replica is None:
            return None
        replica.in_flight += 1
        return Slot(self, replica)

    def choose(
        self,
        session: str | None,
        held: Mapping[str, int] = NOTHING_HELD,
        accepts: Accepts = any_replica,
        *,
        generates: bool = True,
    ) -> Replica | None:
        """The replica for one more request, or None if all that `accepts` permits are busy.

        It is the one that holds the longest prefix of the prompt; `held` are the tokens by the replica's id. Among
        replicas that hold equally much (usually nothing), rendezvous hashing of session and URL decides, so that all
        gateway replicas choose the same one for a new session, and removing a replica moves only the sessions on it. A
        replica whose load would exceed a constant multiple of the mean is skipped (Mirrokni, Thorup, Zadimoghaddam:
        Consistent Hashing with Bounded Loads, 2018). Without a session, it is the least loaded replica.
        """
        usable = self.usable(accepts)
        free = [replica for replica in usable if replica.in_flight < self.slots(replica, generates)]
        if len(usable) > 1 and any(replica.weight < 1.0 for replica in usable):
            # In slow start a replica receives a part of its share, unless the others are full or start as well.
            share = LOAD_FACTOR * (sum(replica.in_flight for replica in usable) + 1) / len(usable)
            largest = max((replica.weight for replica in free), default=1.0)
            below_share = [
                each
                for each in free
                if each.weight >= largest or each.in_flight < each.weight / largest * share
            ]
            if below_share:
                usable = free = below_share
        if not free:
            return None
        if session is None or len(free) == 1:
            return min(free, key=lambda replica: replica.in_flight)
        bound = math.ceil(LOAD_FACTOR * (sum(replica.in_flight for replica in usable) + 1) / len(usable))
        return max(
            [replica for replica in free if replica.in_flight < bound] or free,
            key=lambda replica: (
                held.get(replica.id, 0),
                xxhash.xxh3_64_intdigest(f"{session} {replica.url}".encode()),
            ),
        )


def _give_up(replica: Replica) -> None:
    """End the waits of all requests that the replica has not begun to answer."""
    now = asyncio.get_running_loop().time()
    while replica.waits:
        replica.waits.pop().reschedule(now)


def _smoothed(mean: float | None, value: float | None) -> float | None:
    if value is None or mean is None:
        return mean if value is None else value
    return mean + SMOOTHING * (value - mean)
