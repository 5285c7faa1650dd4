"""The simulated gateway: what its replicas know about the engines when they route a turn."""

from collections.abc import Iterable

import pytest

from dps_gateway.acceptance import UNKNOWN
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Document, LearningPolicy, Observation, PolicyInput, Reason
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.run import Load, Scenario, simulate
from dps_lab.simulate.trace import SessionTrace, TurnLengths

FLEET = FleetSpec({Pool.SPECULATIVE: 0, Pool.GREEDY: 1})
SPECULATIVE = FleetSpec({Pool.SPECULATIVE: 1, Pool.GREEDY: 0})


class Recorder:
    """Send every turn to the greedy pool, and record the inputs of all gateway replicas."""

    def __init__(self) -> None:
        self.turns: list[PolicyInput] = []

    def __deepcopy__(self, memo: dict[int, object]) -> "Recorder":
        return self

    def decide(self, turn: PolicyInput, /) -> Decision:
        self.turns.append(turn)
        return Decision(Pool.GREEDY, Reason.FIXED)


class Learner(Recorder, LearningPolicy):
    """Send every turn to the speculative pool, and record what there is to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: list[Observation] = []

    def decide(self, turn: PolicyInput, /) -> Decision:
        self.turns.append(turn)
        return Decision(Pool.SPECULATIVE, Reason.FIXED)

    def observe(self, observation: Observation, /) -> int | None:
        self.observed.append(observation)
        return observation.verifications

    def export(self) -> Document:
        return {}

    def absorb(self, documents: Iterable[Document], /) -> None:
        pass


def sessions(count: int, turns: int = 1) -> list[SessionTrace]:
    lengths = [TurnLengths(prompt_tokens=1_000 * turn, output_tokens=200) for turn in range(1, turns + 1)]
    return [
        SessionTrace(id=f"s{number}", arrival_seconds=3.0 * number, turns=lengths) for number in range(count)
    ]


def test_prompts_are_queued_until_the_engine_begins_to_answer() -> None:
    recorder = Recorder()
    simulate(sessions(3, turns=2), Scenario(FLEET, recorder, Load(concurrency=3)))
    queued = [turn.pools[Pool.GREEDY].queued_prefill_tokens for turn in recorder.turns]
    assert queued[:4] == [0, 1_000, 2_000, 0]


def test_engine_reports_how_many_requests_it_runs_at_the_same_time() -> None:
    recorder = Recorder()
    serial = FleetSpec({Pool.SPECULATIVE: 1, Pool.GREEDY: 1}, serialized=True)
    simulate(sessions(1), Scenario(serial, recorder, Load(concurrency=1)))
    limits = {pool: view.running_limit for pool, view in recorder.turns[0].pools.items()}
    assert limits == {Pool.SPECULATIVE: 1, Pool.GREEDY: 2048}


def test_requests_of_other_gateway_replicas_are_known_from_the_load_that_the_engine_reports() -> None:
    """Each replica sees its own requests immediately, and those of the others within a second."""
    recorder = Recorder()
    answer = [TurnLengths(prompt_tokens=1_000, output_tokens=6_000)]
    long = [session.model_copy(update={"turns": answer}) for session in sessions(8)]
    simulate(long, Scenario(FLEET, recorder, Load(), replicas=4))
    assert [turn.pools[Pool.GREEDY].load for turn in recorder.turns] == list(range(8))


@pytest.mark.parametrize("reports", [True, False])
def test_acceptance_is_known_only_if_engines_report_their_verifications(reports: bool) -> None:
    learner = Learner()
    simulate(sessions(1, turns=2), Scenario(SPECULATIVE, learner, Load(concurrency=1), reports=reports))
    assert all((turn.verifications is not None) == reports for turn in learner.observed)
    assert [turn.acceptance != UNKNOWN for turn in learner.turns] == [False, reports]


def test_policy_learns_from_the_sessions_before() -> None:
    learner = Learner()
    scenario = Scenario(SPECULATIVE, learner, Load(concurrency=1), replicas=2, before=sessions(3))
    results = simulate(sessions(2), scenario)
    assert (len(results), len(learner.observed)) == (2, 5)
