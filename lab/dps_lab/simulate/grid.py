"""The policy `Adaptive` compared with every static policy and with other fleets of the same size, over many set-ups.

This module performs no I/O.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final, Literal

from dps_gateway.pool import Pool
from dps_gateway.routing.adaptive import Adaptive
from dps_gateway.routing.decision import Policy
from dps_gateway.routing.policies import AlwaysGreedy, AlwaysSpeculative, DeltaPrefill
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.regret import STATIC_POLICIES
from dps_lab.simulate.report import mean_session_seconds, summarize
from dps_lab.simulate.run import Change, Load, Scenario, TurnResult, simulate
from dps_lab.simulate.trace import SessionTrace

CONCURRENCIES: Final = (1, 2, 4, 8, 16, 32, 64)

BOTH: Final = {Pool.SPECULATIVE: 1, Pool.GREEDY: 1}

ADAPTIVE: Final = "Adaptive"
"""The name of the policy that is compared."""

CHANGE_SECONDS: Final = 30.0
"""When the set-up changes."""

SETTLING_SECONDS: Final = 30.0
"""Time after a change for a policy to adapt."""

WINDOW_SECONDS: Final = 30.0
"""Length of the window after that time, in which turns are compared."""

STARTS_SECONDS: Final = 120.0
"""Sessions that start in this time are compared as a whole."""

OTHER_SEED: Final = 1000
"""The difference of the seeds of two runs with the same sessions."""


@dataclass(frozen=True)
class SetUp:
    """One set-up."""

    workload: str
    concurrency: int
    cache: Literal["separate", "common"]
    serialized: bool
    seed: int
    replicas: int = 1

    @property
    def fleet(self) -> FleetSpec:
        """One speculative and one greedy engine."""
        return FleetSpec(BOTH, cache=self.cache, serialized=self.serialized)

    def scenario(self, policy: Policy) -> Scenario:
        """This set-up with a policy."""
        return Scenario(self.fleet, policy, Load(self.concurrency), self.replicas, self.seed)


@dataclass(frozen=True)
class Times:
    """The batch time, and the median and the mean session latency of a run, in seconds."""

    batch: float
    median: float
    mean: float

    @classmethod
    def of(cls, results: Sequence[TurnResult]) -> "Times":
        """The times of a completed run."""
        report = summarize(results, gpus=0, regret=0.0)
        return cls(report.batch_seconds, report.session_seconds.median, mean_session_seconds(results))

    @classmethod
    def over_runs(cls, times: "Sequence[Times]") -> "Times":
        """The means over several runs."""
        return cls(
            fmean(each.batch for each in times),
            fmean(each.median for each in times),
            fmean(each.mean for each in times),
        )


@dataclass(frozen=True)
class Comparison:
    """The times of `Adaptive`, of the static policies on the same engines, and of fleets of one kind, by name."""

    set_up: SetUp
    adaptive: Times
    static: dict[str, Times]
    fleets: dict[str, Times]

    @property
    def excess(self) -> Times:
        """The relative excess over the best static policy for each time; negative if no static policy is as fast."""
        return _excess(self.adaptive, list(self.static.values()))

    def near_both(self, tolerance: float) -> list[str]:
        """The policies whose batch time and whose median exceed the best static policy for each by `tolerance` at most.

        The names are those of `static`, and ADAPTIVE.
        """
        batch = min(each.batch for each in self.static.values())
        median = min(each.median for each in self.static.values())
        return [
            name
            for name, times in {ADAPTIVE: self.adaptive, **self.static}.items()
            if times.batch <= (1 + tolerance) * batch and times.median <= (1 + tolerance) * median
        ]

    @property
    def frontier(self) -> list[str]:
        """The static policies that no other one equals or betters in both batch time and median, by batch time."""
        found: list[str] = []
        for name in sorted(self.static, key=lambda name: (self.static[name].batch, self.static[name].median)):
            if not found or self.static[name].median < self.static[found[-1]].median:
                found.append(name)
        return found


def mean_over_seeds(comparisons: Sequence[Comparison]) -> Comparison:
    """The mean times of set-ups that differ only in the seed; `set_up` is the first of them."""
    first = comparisons[0]
    return Comparison(
        set_up=first.set_up,
        adaptive=Times.over_runs([each.adaptive for each in comparisons]),
        static={name: Times.over_runs([each.static[name] for each in comparisons]) for name in first.static},
        fleets={name: Times.over_runs([each.fleets[name] for each in comparisons]) for name in first.fleets},
    )


def set_ups(
    workloads: Sequence[str], concurrencies: Sequence[int], seeds: Sequence[int], replicas: int = 1
) -> Iterator[SetUp]:
    """All set-ups with these workloads, numbers of concurrent sessions and seeds."""
    caches: tuple[Literal["separate", "common"], ...] = ("separate", "common")
    for workload in workloads:
        for seed in seeds:
            for cache in caches:
                for serialized in (False, True):
                    for concurrency in concurrencies:
                        yield SetUp(workload, concurrency, cache, serialized, seed, replicas)


def sample(sessions: Sequence[SessionTrace], count: int, seed: int) -> list[SessionTrace]:
    """`count` of the sessions in random order; all of them if there are not as many."""
    shuffled = list(sessions)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:count]


def compare(sessions: Sequence[SessionTrace], set_up: SetUp) -> Comparison:
    """Simulate a set-up with every policy, and the fleets of one kind."""
    fleets: dict[str, tuple[dict[Pool, int], Policy]] = {
        "greedy=2": ({Pool.SPECULATIVE: 0, Pool.GREEDY: 2}, AlwaysGreedy()),
        "speculative=2": ({Pool.SPECULATIVE: 2, Pool.GREEDY: 0}, AlwaysSpeculative()),
    }
    return Comparison(
        set_up=set_up,
        adaptive=Times.of(simulate(sessions, set_up.scenario(Adaptive()))),
        static={
            name_of(policy): Times.of(simulate(sessions, set_up.scenario(policy)))
            for policy in STATIC_POLICIES
        },
        fleets={
            name: Times.of(
                simulate(
                    sessions, replace(set_up.scenario(policy), fleet=replace(set_up.fleet, engines=engines))
                )
            )
            for name, (engines, policy) in fleets.items()
        },
    )


def repeat_best(sessions: Sequence[SessionTrace], set_up: SetUp) -> Times:
    """Simulate the static policy that is best for each time again, with other random numbers.

    They determine which drafts are accepted. Returns the relative excess of each time over the first run. A difference
    between policies may be due to chance if it is as large.
    """
    first = {policy: Times.of(simulate(sessions, set_up.scenario(policy))) for policy in STATIC_POLICIES}
    again = replace(set_up, seed=set_up.seed + OTHER_SEED)

    @functools.cache
    def second(policy: Policy) -> Times:
        return Times.of(simulate(sessions, again.scenario(policy)))

    def of_best(time: Callable[[Times], float]) -> float:
        return time(second(min(first, key=lambda policy: time(first[policy]))))

    repeated = Times(
        of_best(lambda times: times.batch),
        of_best(lambda times: times.median),
        of_best(lambda times: times.mean),
    )
    return _excess(repeated, list(first.values()))


CHANGES: Final[dict[str, tuple[int, tuple[Change, ...]]]] = {
    "load 4 to 48": (4, (Change(CHANGE_SECONDS, concurrency=48),)),
    "load 48 to 4": (48, (Change(CHANGE_SECONDS, concurrency=4),)),
    "speculative engine at half speed": (
        8,
        (Change(CHANGE_SECONDS, pool=Pool.SPECULATIVE, slowdown=2.0),),
    ),
    "greedy engine at half speed": (8, (Change(CHANGE_SECONDS, pool=Pool.GREEDY, slowdown=2.0),)),
    "acceptance length 1": (8, (Change(CHANGE_SECONDS, pool=Pool.SPECULATIVE, acceptance_length=1.0),)),
}
"""By name: the number of concurrent sessions at the start, and what changes."""


def compare_after(
    sessions: Sequence[SessionTrace], set_up: SetUp, changes: tuple[Change, ...]
) -> dict[str, float]:
    """The mean latency in seconds, by policy, of the turns that end with `Adaptive` in the window after a change.

    The other policies serve these turns somewhat earlier or later. In the window itself, each policy would complete
    different turns, and the lengths of their answers differ by more than the policies do.

    Raises ValueError if all sessions may have ended before the window does.
    """
    start = CHANGE_SECONDS + SETTLING_SECONDS
    end = start + WINDOW_SECONDS
    scenario = replace(set_up.scenario(Adaptive()), changes=changes)
    served = simulate(sessions, replace(scenario, until_seconds=end))
    known = {turn.session for turn in served}
    if len(known) == len(sessions):
        raise ValueError(f"{len(sessions)} sessions do not last for {end:.0f} s; use more sessions")
    compared = {(turn.session, turn.number): turn.seconds for turn in served if turn.finished >= start}
    # More sessions follow, so that the load does not fall before the last of these turns.
    following = max(set_up.concurrency, *(change.concurrency or 0 for change in changes))
    last = max(index for index, session in enumerate(sessions) if session.id in known)
    needed = sessions[: last + 1 + following]
    means = {ADAPTIVE: fmean(compared.values())}
    for policy in STATIC_POLICIES:
        results = simulate(needed, replace(scenario, policy=policy))
        means[name_of(policy)] = fmean(
            turn.seconds for turn in results if (turn.session, turn.number) in compared
        )
    return means


def compare_with_change(
    sessions: Sequence[SessionTrace], set_up: SetUp, changes: tuple[Change, ...]
) -> Comparison:
    """Simulate a set-up with a change and with every policy until all sessions have ended.

    The sessions are those that start in STARTS_SECONDS with `Adaptive`. Unlike the window of `compare_after`, this
    comparison has the same turns with every policy even if a turn takes longer than the window. Fleets of one kind are
    not simulated.

    Raises ValueError if all sessions start earlier.
    """
    scenario = replace(set_up.scenario(Adaptive()), changes=changes)
    started = {turn.session for turn in simulate(sessions, replace(scenario, until_seconds=STARTS_SECONDS))}
    if len(started) == len(sessions):
        raise ValueError(
            f"{len(sessions)} sessions do not last for {STARTS_SECONDS:.0f} s; use more sessions"
        )
    last = max(index for index, session in enumerate(sessions) if session.id in started)

    def times(policy: Policy) -> Times:
        return Times.of(simulate(sessions[: last + 1], replace(scenario, policy=policy)))

    static = {name_of(policy): times(policy) for policy in STATIC_POLICIES}
    return Comparison(set_up, times(Adaptive()), static, fleets={})


def repeat(sessions: Sequence[SessionTrace], times: int) -> list[SessionTrace]:
    """The sessions several times, with different ids."""
    return [
        session.model_copy(update={"id": f"{session.id}/{number}"})
        for number in range(times)
        for session in sessions
    ]


def name_of(policy: Policy) -> str:
    """The name of a policy, with its threshold."""
    if isinstance(policy, DeltaPrefill):
        return f"τ = {policy.threshold_tokens}"
    return type(policy).__name__


def _excess(own: Times, others: Sequence[Times]) -> Times:
    return Times(
        own.batch / min(each.batch for each in others) - 1,
        own.median / min(each.median for each in others) - 1,
        own.mean / min(each.mean for each in others) - 1,
    )
