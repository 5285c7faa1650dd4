"""What `dps calibrate` measures on running engines, in virtual time: the engine's parameters are found again."""

import random
from collections.abc import Sequence
from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_lab.calibrate.measure import (
    Answer,
    EngineMeasurement,
    MeasurementError,
    Plan,
    fit,
    line,
    measure,
    measured_fleet,
)
from dps_lab.calibrate.setup import Conditions, Setup
from dps_lab.simulate.fleet import FleetSpec
from dps_lab.simulate.measured_timing import PassTimes
from dps_lab.simulate.run import Load
from dps_lab.simulate.trace import SessionTrace, TurnLengths
from dps_local.emulated_sglang.generation import Plan as AnswerPlan
from dps_local.emulated_sglang.scheduler import Scheduler
from dps_local.emulated_sglang.scheduler import Sequence as EngineSequence
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, TimeModel

CHATS = [f"please answer question {number} in detail" for number in range(40)]
TOKENS_PER_WORD = 2
REQUEST_SECONDS = 0.004


class VirtualEngine:
    """A probe of an emulated engine in virtual time, with a client that needs REQUEST_SECONDS for each request."""

    def __init__(self, model: TimeModel, serialized: bool = False) -> None:
        self._scheduler = Scheduler(model, 900_000, 64, serialized)
        self._now = 0.0
        self.requests = 0

    async def answers(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        sent = self._now
        self._now += REQUEST_SECONDS
        sequences = [self._sequence(prompt, max_tokens) for prompt in prompts]
        chunks: dict[str, list[float]] = {sequence.rid: [] for sequence in sequences}
        for sequence in sequences:
            self._scheduler.submit(sequence)
        while step := self._scheduler.next_step(self._now):
            self._now += step.seconds
            for sequence in self._scheduler.complete(step, self._now):
                chunks[sequence.rid].append(self._now)
        return [
            Answer(
                sent,
                tuple(chunks[sequence.rid]),
                len(sequence.prompt),
                sequence.cached_tokens,
                sequence.generated,
            )
            for sequence in sequences
        ]

    def _sequence(self, prompt: str, tokens: int) -> EngineSequence:
        self.requests += 1
        ids = tuple(hash((word, part)) for word in prompt.split() for part in range(TOKENS_PER_WORD))
        rid = str(self.requests)
        plan = AnswerPlan(tuple(range(tokens)), "", (), {"type": "length"})
        return EngineSequence(rid, ids, plan, self._now, random.Random(rid))


GREEDY = TimeModel()
STANDALONE = TimeModel(speculation=SPECULATION_DEFAULTS["STANDALONE"])
SLOW = TimeModel(prefill_tokens_per_second=900, decode_base_seconds=0.2, decode_seconds_per_request=0.01)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(STANDALONE, id="draft model"),
        pytest.param(TimeModel(speculation=SPECULATION_DEFAULTS["NGRAM"]), id="n-grams"),
        pytest.param(SLOW, id="slow"),
    ],
)
async def test_the_parameters_of_an_engine_are_found_within_five_percent(model: TimeModel) -> None:
    found = await measure(VirtualEngine(model), CHATS, Plan())
    for tokens in (200, 1000, 6000):
        prefill = found.passes.prefill_base_seconds + tokens * found.passes.prefill_seconds_per_token
        expected = model.prefill_seconds(tokens) + REQUEST_SECONDS
        assert prefill + found.request_seconds == pytest.approx(expected, rel=0.05)
    for batch in (1, 4, 16):
        decode = found.passes.decode_base_seconds + batch * found.passes.decode_seconds_per_request
        assert decode == pytest.approx(model.decode_seconds(batch), rel=0.05)
    accepted = 1.0 if model.speculation is None else model.speculation.acceptance_length
    assert found.acceptance_length == pytest.approx(accepted, rel=0.05)
    assert not found.serialized


async def test_an_engine_that_serves_one_request_at_a_time_is_recognised() -> None:
    found = await measure(VirtualEngine(STANDALONE, serialized=True), CHATS, Plan())
    assert found.serialized
    assert found.passes.decode_seconds_per_request == 0
    assert found.passes.decode_base_seconds == pytest.approx(STANDALONE.decode_seconds(1), rel=0.05)


@pytest.mark.parametrize("plan", [Plan(), Plan((10, 20), 1, (1, 2), 1, 32)], ids=["default", "small"])
async def test_an_engine_receives_as_many_requests_as_stated(plan: Plan) -> None:
    engine = VirtualEngine(GREEDY)
    await measure(engine, CHATS, plan)
    assert engine.requests == plan.requests


def test_prompts_fit_into_a_short_context() -> None:
    assert Plan().within(32_768) == Plan()
    assert Plan().within(2048).prompt_words == (100, 341, 341)


async def test_engines_without_answers_are_refused() -> None:
    with pytest.raises(MeasurementError, match=r"only 0 decode steps; check that it streams"):
        await measure(VirtualEngine(GREEDY), CHATS, replace(Plan(), answer_tokens=1))


class BusyEngine(VirtualEngine):
    """An engine that the load of other clients delays during the first requests, the short prompts most."""

    def __init__(self, requests: int) -> None:
        super().__init__(GREEDY)
        self._delayed = requests

    async def answers(self, prompts: Sequence[str], max_tokens: int) -> list[Answer]:
        answers = await super().answers(prompts, max_tokens)
        if self.requests > self._delayed:
            return answers
        return [replace(answer, sent=answer.sent - 1000 / answer.prompt_tokens) for answer in answers]


async def test_prefill_is_measured_again_if_load_hides_its_time() -> None:
    engine = BusyEngine(1 + Plan().repeats * len(Plan().prompt_words))
    found = await measure(engine, CHATS, Plan())
    undisturbed = await measure(VirtualEngine(GREEDY), CHATS, Plan())
    assert astuple(found.passes) == pytest.approx(astuple(undisturbed.passes), rel=0.01)
    assert engine.requests == Plan().requests + Plan().repeats * len(Plan().prompt_words)


async def test_engines_whose_load_always_hides_the_time_of_prefill_are_refused() -> None:
    with pytest.raises(MeasurementError, match="took no longer than the short ones; measure it while"):
        await measure(BusyEngine(1000), CHATS, Plan())


def test_the_fastest_prefill_of_a_length_counts_and_parts_may_arrive_together() -> None:
    prefills = [
        [Answer(0.0, (0.5,), 100, 0, 1), Answer(0.0, (0.11,), 110, 10, 1)],
        [Answer(1.0, (1.2,), 200, 0, 1), Answer(0.0, (0.9,), 200, 0, 1)],
    ]
    bunched = Answer(0.0, (0.0, 0.01, 0.05, 0.05, 0.05, 0.05, 0.07), 10, 0, 7)
    even = Answer(0.0, tuple(step / 100 for step in range(21)), 10, 0, 21)
    found = fit(prefills, [[bunched], [even]])
    assert found.passes.prefill_seconds_per_token == pytest.approx(0.0009)
    assert found.passes.decode_base_seconds == pytest.approx((0.06 + 0.19) / 24)
    assert found.acceptance_length == 1


def test_a_pool_has_the_mean_of_its_engines() -> None:
    one = EngineMeasurement(PassTimes(0.25, 0.125, 0.5, 0.0625), 0.5, 2.0, False)
    other = EngineMeasurement(PassTimes(0.75, 0.375, 1.5, 0.1875), 1.5, 3.0, True)
    assert EngineMeasurement.mean([one, other]) == EngineMeasurement(
        PassTimes(0.5, 0.25, 1.0, 0.125), 1.0, 2.5, True
    )


MEASURED = {
    Pool.SPECULATIVE: EngineMeasurement(PassTimes(0.02, 0.0001, 0.03, 0.0), 0.01, 5.5, False),
    Pool.GREEDY: EngineMeasurement(PassTimes(0.02, 0.0001, 0.02, 0.0), 0.03, 1.0, False),
}


@pytest.mark.parametrize(("given", "accepted", "drafts"), [(None, 5.5, 6), (2.0, 2.0, 4)])
def test_the_fleet_has_the_measured_engines(given: float | None, accepted: float, drafts: int) -> None:
    fleet = measured_fleet(FleetSpec(dict.fromkeys(Pool, 1)), MEASURED, given)
    assert fleet.measured == {pool: each.passes for pool, each in MEASURED.items()}
    assert (fleet.speculation.acceptance_length, fleet.speculation.draft_tokens) == (accepted, drafts)
    assert fleet.efficiency.request_seconds == pytest.approx(0.02)


@pytest.mark.parametrize(("policy", "decode"), [("AlwaysGreedy", 5 * 0.02), ("AlwaysSpeculative", 0.03)])
def test_a_simulation_has_the_measured_times(policy: str, decode: float) -> None:
    """1,000 tokens of prompt and 6 of answer: a prefill of 0.12 s, and 5 steps of 0.02 s or one of 0.03 s."""
    fleet = measured_fleet(FleetSpec(dict.fromkeys(Pool, 1)), MEASURED, None)
    turns = [TurnLengths(prompt_tokens=1000, output_tokens=6)]
    conditions = Conditions([SessionTrace(id="s", turns=turns)], Load(concurrency=1), fleet)
    measured = conditions.measure(Setup(1, 1, policy), 0)
    assert measured.session_median == pytest.approx(0.02 + 0.12 + decode, abs=0.001)


points = st.tuples(st.floats(0, 1e4), st.floats(0, 10), st.floats(1, 100))


@given(st.lists(points, min_size=1, max_size=8))
def test_a_line_never_predicts_negative_times(values: list[tuple[float, float, float]]) -> None:
    intercept, slope = line(values)
    assert intercept >= 0
    assert slope >= 0


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_line_goes_through_points_on_a_line(intercept: float, slope: float) -> None:
    found = line([(x, intercept + slope * x, 1.0) for x in (1, 4, 16)])
    assert found == pytest.approx((intercept, slope), abs=1e-9)
