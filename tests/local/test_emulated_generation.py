"""The emulated model's answers, and the conditions that end them."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_local.emulated_sglang.generation import AnswerPlanner, Plan, SamplingParams, Vocabulary

EOS = 0
WORDS = {1: " one", 2: " two", 3: " three"}
VOCABULARY = Vocabulary(tuple(WORDS), WORDS, EOS)
PROMPT = (5, 6, 7)
TEN = SamplingParams(max_new_tokens=10, ignore_eos=True)


def plan(params: SamplingParams = TEN, *, seed: int = 0, choice: int = 0, room: int = 1000) -> Plan:
    return AnswerPlanner(VOCABULARY, seed, mean_tokens=5.0).plan(PROMPT, params, room, choice)


def test_answer_is_deterministic() -> None:
    assert plan() == plan()


@pytest.mark.parametrize(
    "other", [plan(seed=1), plan(choice=1), plan(replace(TEN, sampling_seed=1))], ids=["engine", "n", "seed"]
)
def test_answer_differs_by_seed_and_choice(other: Plan) -> None:
    assert other != plan()


def test_answer_with_ignore_eos_has_the_maximum_length() -> None:
    answer = plan()
    assert len(answer.token_ids) == 10
    assert answer.finish_reason == {"type": "length", "length": 10}
    assert answer.text == "".join(WORDS[token] for token in answer.token_ids)


def test_remaining_context_limits_an_answer_without_max_new_tokens() -> None:
    assert len(plan(SamplingParams(max_new_tokens=None, ignore_eos=True), room=17).token_ids) == 17


def test_eos_token_is_counted_but_has_no_text() -> None:
    answer = plan(SamplingParams(max_new_tokens=None))
    assert answer.token_ids[-1] == EOS
    assert answer.finish_reason == {"type": "stop", "matched": EOS}
    assert answer.text == "".join(WORDS[token] for token in answer.token_ids[:-1])


@pytest.mark.parametrize(
    ("trim", "expected"), [(False, " one two"), (True, " one two three")], ids=["trimmed", "no_stop_trim"]
)
def test_stop_string_ends_the_answer(trim: bool, expected: str) -> None:
    vocabulary = Vocabulary((1,), {1: " one two three four"}, EOS)
    params = SamplingParams(max_new_tokens=3, stop=(" three",), ignore_eos=True, no_stop_trim=trim)
    answer = AnswerPlanner(vocabulary, 0, 5.0).plan(PROMPT, params, 100, 0)

    assert answer.finish_reason == {"type": "stop", "matched": " three"}
    assert len(answer.token_ids) == 1
    assert answer.text == (" one two three four" if trim else expected)


def test_stop_token_ends_the_answer_without_text() -> None:
    stop = plan().token_ids[4]
    before = plan().token_ids.index(stop)
    answer = plan(replace(TEN, stop_token_ids=frozenset({stop})))

    assert answer.token_ids == plan().token_ids[: before + 1]
    assert answer.finish_reason == {"type": "stop", "matched": stop}
    assert answer.text_after(before + 1) == answer.text_after(before)


@given(
    longest=st.integers(0, 40),
    shortest=st.integers(0, 40),
    seed=st.integers(0, 1000),
    stop=st.sampled_from([(), (" two",), ("e t",), (" one", "three")]),
)
def test_text_grows_with_the_tokens_within_the_limits(
    longest: int, shortest: int, seed: int, stop: tuple[str, ...]
) -> None:
    params = SamplingParams(max_new_tokens=longest, min_new_tokens=min(shortest, longest), stop=stop)
    answer = plan(params, seed=seed)
    texts = [answer.text_after(tokens) for tokens in range(len(answer.token_ids) + 1)]

    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == answer.text
    assert len(answer.token_ids) <= longest
    assert not any(each in answer.text for each in stop) or answer.finish_reason["type"] == "length"
    if not stop:
        assert len(answer.token_ids) >= params.min_new_tokens


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, None),
        ({"temperature": -1.0}, "temperature must be a non-negative finite number, got -1.0."),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0."),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1."),
        (
            {"max_new_tokens": 2, "min_new_tokens": 3},
            "min_new_tokens must be in [0, max_new_tokens(2)], got 3.",
        ),
    ],
)
def test_sampling_parameters_are_validated(fields: dict[str, Any], problem: str | None) -> None:
    assert SamplingParams(**fields).problem() == problem
