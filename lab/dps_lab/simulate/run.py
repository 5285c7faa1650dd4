"""The simulation: sessions, gateway and engines driven by one event queue. No clock, no I/O."""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import LearningPolicy, Observation, Policy, Reason, decoding_load
from dps_gateway.upstream.health import LOAD_INTERVAL_SECONDS as POLL_SECONDS
from dps_lab.simulate.budget import INTERVAL_SECONDS as BALANCE_SECONDS
from dps_lab.simulate.budget import Balancer
from dps_lab.simulate.fleet import FleetSpec, build_engines
from dps_lab.simulate.gateway import Placement, SessionRecord, VirtualGateway
from dps_lab.simulate.gpu import SharedGpu
from dps_lab.simulate.prompts import PlannedSession, PlannedTurn, plan_sessions
from dps_lab.simulate.roofline import REQUEST_SECONDS
from dps_lab.simulate.trace import SessionTrace
from dps_local.emulated_sglang.scheduler import Sequence as Request


@dataclass(frozen=True)
class Load:
    """How sessions arrive: closed loop (`concurrency`), open loop (Poisson, `rate` per second), or as recorded."""

    concurrency: int | None = None
    rate: float | None = None


@dataclass(frozen=True)
class Scenario:
    """Everything that a run depends on besides the sessions. `replicas` counts the gateway's replicas.

    reports: whether engines report their verifications. before: sessions that the gateway, with one replica, has served
    before, so that a policy has learned from them.
    """

    fleet: FleetSpec
    policy: Policy
    load: Load
    replicas: int = 1
    seed: int = 0
    reports: bool = True
    before: Sequence[SessionTrace] = ()


@dataclass(frozen=True)
class TurnResult:
    """One served turn. Times are in seconds since the start of the simulation, lengths in tokens."""

    session: str
    number: int
    pool: Pool
    reason: Reason
    moved: bool
    prompt_tokens: int
    delta_tokens: int
    cached_tokens: int
    output_tokens: int
    sent: float
    first_token: float
    finished: float

    @property
    def seconds(self) -> float:
        """Latency of the whole turn."""
        return self.finished - self.sent


class TraceTooLong(ValueError):
    """A turn exceeds an engine's KV cache; the message names the session."""


@dataclass
class _Active:
    """A session in progress."""

    plan: PlannedSession
    turns: Iterator[tuple[int, PlannedTurn]]
    record: SessionRecord


@dataclass
class _InFlight:
    """A turn that has been routed and has not ended."""

    active: _Active
    number: int
    turn: PlannedTurn
    placement: Placement
    sent: float
    load_at_start: int = 0
    """`Replica.load` when the engine began to answer."""


Event = Callable[[float], None]
"""An event, called with the time at which it occurs."""


def simulate(sessions: Sequence[SessionTrace], scenario: Scenario) -> list[TurnResult]:
    """Serve every session. Returns all turns in the order in which they ended. Deterministic for a seed.

    Raises TraceTooLong if a turn exceeds the KV cache, and ValueError if the weights exceed the GPU's memory.
    """
    if scenario.before and isinstance(scenario.policy, LearningPolicy):
        earlier = _Simulation(scenario.before, replace(scenario, replicas=1))
        earlier.run()
        scenario = replace(scenario, policy=earlier.policy)
    return _Simulation(sessions, scenario).run()


class _Simulation:
    """One run over one fleet."""

    def __init__(self, sessions: Sequence[SessionTrace], scenario: Scenario) -> None:
        groups = build_engines(scenario.fleet)
        self._gpus = [SharedGpu(group) for group in groups]
        engines = [engine for group in groups for engine in group]
        _check_lengths(sessions, min(engine.scheduler.capacity for engine in engines))
        self._active = 0
        self._gateway = VirtualGateway(scenario.policy, engines, scenario.replicas, scenario.seed)
        fleet = scenario.fleet
        self._balancer = None if fleet.budget is None else Balancer(fleet, fleet.budget, self._gateway)
        self._sessions = plan_sessions(sessions)
        self._load = scenario.load
        self._seed = scenario.seed
        self._reports = scenario.reports
        self._events: list[tuple[float, int, Event]] = []
        self._order = count()
        self._in_flight: dict[str, _InFlight] = {}
        self._results: list[TurnResult] = []
        self._waiting = iter(self._sessions)

    @property
    def policy(self) -> Policy:
        """The policy of the gateway's first replica, with what it has learned."""
        return self._gateway.policies[0]

    def run(self) -> list[TurnResult]:
        """Process events until none is left."""
        self._at(0.0, self._poll)
        if self._balancer is not None:
            self._at(BALANCE_SECONDS, partial(self._balance, self._balancer))
        self._schedule_arrivals()
        while self._events:
            now = self._events[0][0]
            # All events of one moment are processed before a batch is formed.
            while self._events and self._events[0][0] <= now:
                _, _, event = heapq.heappop(self._events)
                event(now)
            for gpu in self._gpus:
                if gpu.start_idle(now):
                    self._await_completion(gpu)
        return self._results

    def _schedule_arrivals(self) -> None:
        if self._load.concurrency is not None:
            self._at(0.0, self._fill)
            return
        if self._load.rate is not None:
            rng = random.Random(f"{self._seed}/arrivals")
            times = list(accumulate(rng.expovariate(self._load.rate) for _ in self._sessions))
        else:
            recorded = [session.trace.arrival_seconds or 0.0 for session in self._sessions]
            first = min(recorded)
            times = [time - first for time in recorded]
        for session, time in zip(self._sessions, times, strict=True):
            self._at(time, partial(self._start, session))

    def _fill(self, now: float) -> None:
        """In a closed loop, start sessions until the intended number is in progress."""
        while self._load.concurrency is not None and self._active < self._load.concurrency:
            session = next(self._waiting, None)
            if session is None:
                return
            self._active += 1
            self._start(session, now)

    def _poll(self, now: float) -> None:
        """Report the engines' load to the gateway, and again after an interval if the simulation has not ended.

        Reports of an idle fleet are equal, so that those before the next event are left out.
        """
        self._gateway.poll()
        if self._unfinished():
            idle = 0.0 if self._in_flight else self._events[0][0] - now
            self._at(now + max(1, idle // POLL_SECONDS) * POLL_SECONDS, self._poll)

    def _balance(self, balancer: Balancer, now: float) -> None:
        """Let the balancer measure, and again after an interval if the simulation has not ended."""
        engine = balancer.measure(now)
        if engine is not None:
            self._gpus.append(SharedGpu([engine]))
        if self._unfinished():
            self._at(now + BALANCE_SECONDS, partial(self._balance, balancer))

    def _unfinished(self) -> bool:
        """Whether anything but a periodic event will happen.

        The two periodic events, which call this, are removed from the queue before they run, so that at most the other
        one is in the queue.
        """
        return len(self._events) > (self._balancer is not None)

    def _start(self, session: PlannedSession, now: float) -> None:
        active = _Active(session, enumerate(session.turns()), SessionRecord())
        self._next_turn(active, now)

    def _next_turn(self, active: _Active, now: float) -> None:
        following = next(active.turns, None)
        if following is None:
            self._active -= 1
            self._fill(now)
            return
        number, turn = following
        self._at(now + turn.think_seconds, partial(self._send, active, number, turn))

    def _send(self, active: _Active, number: int, turn: PlannedTurn, now: float) -> None:
        placement = self._gateway.place(
            active.plan.trace.id, number, turn, active.record, active.plan.trace.prefix or ""
        )
        flight = _InFlight(active, number, turn, placement, now)
        self._at(now + REQUEST_SECONDS, partial(self._arrive, flight))

    def _arrive(self, flight: _InFlight, now: float) -> None:
        """Submit a request to its engine, after fetching the prefix that a common cache has for it."""
        engine = flight.placement.engine
        rid = f"{self._seed}/{flight.active.plan.trace.id}/{flight.number}"
        self._in_flight[rid] = flight
        sequence = engine.sequence(rid, flight.turn, now)
        fetch = engine.fetch_for(flight.turn.prompt)
        if fetch is None:
            engine.submit(sequence)
        else:
            self._at(now + fetch.seconds, lambda _: engine.submit(sequence, fetch))

    def _await_completion(self, gpu: SharedGpu) -> None:
        due = gpu.next_completion()
        if due is not None:
            self._at(due, partial(self._complete, gpu, gpu.version))

    def _complete(self, gpu: SharedGpu, version: int, now: float) -> None:
        if version != gpu.version:
            return
        for progressed in gpu.complete(now):
            for sequence in progressed:
                if sequence.first_token == now:
                    flight = self._in_flight[sequence.rid]
                    flight.load_at_start = flight.placement.replica.load
                    self._gateway.answering(flight.placement)
                if sequence.finished is not None:
                    self._finish(sequence, now)
        self._await_completion(gpu)

    def _finish(self, sequence: Request, now: float) -> None:
        flight = self._in_flight.pop(sequence.rid)
        placement = flight.placement
        assert sequence.first_token is not None
        drafts = self._reports and placement.decision.pool is Pool.SPECULATIVE
        seen = _observation(flight, sequence, now, sequence.verify_steps if drafts else None)
        if verifications := self._gateway.observe(placement, seen, now):
            record = flight.active.record
            record.acceptance = record.acceptance.observed(
                sequence.generated, verifications, placement.turn.number
            )
        self._gateway.release(placement)
        self._results.append(
            TurnResult(
                session=flight.active.plan.trace.id,
                number=flight.number,
                pool=placement.decision.pool,
                reason=placement.decision.reason,
                moved=placement.moved,
                prompt_tokens=len(sequence.prompt),
                delta_tokens=flight.turn.delta_tokens,
                cached_tokens=sequence.cached_tokens,
                output_tokens=sequence.generated,
                sent=flight.sent,
                first_token=sequence.first_token,
                finished=now,
            )
        )
        self._next_turn(flight.active, now)

    def _at(self, time: float, event: Event) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))


def _observation(flight: _InFlight, sequence: Request, now: float, verifications: int | None) -> Observation:
    """What the gateway observes of an answered turn."""
    placement, view = flight.placement, flight.placement.view
    assert sequence.first_token is not None
    return Observation(
        pool=placement.decision.pool,
        turn=placement.turn,
        view=view,
        cached_tokens=sequence.cached_tokens,
        fetched_tokens=None,  # all tokens that the record expects to be fetched are fetched
        output_tokens=sequence.generated,
        decoding_load=decoding_load(flight.load_at_start, placement.replica.load),
        later_prefill_tokens=placement.replica.begun_after(placement.sent_tokens),
        first_token_seconds=sequence.first_token - flight.sent,
        total_seconds=now - flight.sent,
        verifications=verifications,
    )


def _check_lengths(sessions: Sequence[SessionTrace], capacity: int) -> None:
    for session in sessions:
        for index, turn in enumerate(session.turns):
            needed = turn.prompt_tokens + turn.output_tokens
            if needed > capacity:
                raise TraceTooLong(
                    f"session '{session.id}': turns[{index}] needs {needed:,} tokens, and the KV cache of an "
                    f"engine holds {capacity:,}; shorten the turn, or choose --hardware with more memory"
                )
