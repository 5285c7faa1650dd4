"""Length traces: valid and invalid files, and the prefixes that prompts share."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_lab.simulate.prompts import plan_sessions
from dps_lab.simulate.trace import SessionTrace, TraceError, TurnLengths, parse_trace

TURN = {"prompt_tokens": 100, "output_tokens": 10, "think_seconds": 0}
SESSION = {"id": "a", "prefix": None, "prefix_tokens": 0, "arrival_seconds": None, "turns": [TURN]}


def prompts(*sessions: dict[str, Any]) -> list[list[tuple[int, ...]]]:
    planned = plan_sessions(parse_trace([json.dumps(session) for session in sessions]))
    return [[turn.prompt for turn in session.turns()] for session in planned]


def common_prefix(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def test_a_line_is_a_session_and_blank_lines_are_skipped() -> None:
    assert parse_trace([json.dumps(SESSION), "", " \n"]) == [
        SessionTrace(id="a", turns=[TurnLengths(prompt_tokens=100, output_tokens=10)])
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "the line is not valid JSON (EOF while parsing an object at line 1 column 1)"),
        ({"id": "b"}, "turns: the field is missing; add it"),
        (
            {"id": "b", "turns": [TURN, TURN | {"output_tokens": 0}]},
            "turns[1].output_tokens: Input should be greater than 0, got 0",
        ),
        (
            SESSION | {"id": "b", "prefixTokens": 3},
            "prefixTokens: unknown field; remove it or use one of id, prefix, prefix_tokens",
        ),
        (
            SESSION | {"id": "b", "prefix": "p", "prefix_tokens": 101},
            "prefix_tokens: 101 is more than turns[0].prompt_tokens (100)",
        ),
        (SESSION, "id: 'a' is already used on line 1"),
        (json.dumps([SESSION] * 1000), "the line is not a JSON object; write one JSON object per line"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number_and_field(
    line: str | dict[str, Any], message: str
) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    with pytest.raises(TraceError) as caught:
        parse_trace([json.dumps(SESSION), text], "t.jsonl")
    assert str(caught.value).startswith(f"t.jsonl, line 2: {message}")
    assert len(str(caught.value)) < 300


def test_a_file_without_sessions_is_refused() -> None:
    with pytest.raises(TraceError, match="contains no sessions"):
        parse_trace(["\n"])


def test_a_prompt_extends_the_previous_prompt_and_its_answer() -> None:
    [[first, second]] = prompts(SESSION | {"turns": [TURN, TURN | {"prompt_tokens": 150}]})
    assert second[:100] == first
    assert len(second) == 150


def test_a_shorter_prompt_is_a_new_history_that_keeps_only_the_shared_prefix() -> None:
    turns = [TURN, TURN | {"prompt_tokens": 50}]
    [planned] = plan_sessions(
        parse_trace([json.dumps(SESSION | {"prefix": "p", "prefix_tokens": 20, "turns": turns})])
    )
    first, second = planned.turns()
    assert common_prefix(first.prompt, second.prompt) == 20
    assert second.delta_tokens == 50


def test_sessions_share_exactly_the_tokens_of_a_common_prefix() -> None:
    [[first], [second], [other], [alone]] = prompts(
        SESSION | {"prefix": "p", "prefix_tokens": 40},
        SESSION | {"id": "b", "prefix": "p", "prefix_tokens": 30},
        SESSION | {"id": "c", "prefix": "q", "prefix_tokens": 40},
        SESSION | {"id": "d"},
    )
    assert common_prefix(first, second) == 30
    assert common_prefix(first, other) == common_prefix(first, alone) == 0


@given(
    st.lists(
        st.builds(TurnLengths, prompt_tokens=st.integers(1, 500), output_tokens=st.integers(1, 200)),
        min_size=1,
        max_size=5,
    )
)
def test_prompts_and_answers_have_the_lengths_of_the_trace(turns: list[TurnLengths]) -> None:
    [session] = plan_sessions([SessionTrace(id="a", turns=turns)])
    for planned, lengths in zip(session.turns(), turns, strict=True):
        assert len(planned.prompt) == lengths.prompt_tokens
        assert len(planned.answer) == lengths.output_tokens
        assert 0 <= planned.delta_tokens <= lengths.prompt_tokens
