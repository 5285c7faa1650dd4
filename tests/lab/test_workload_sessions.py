"""The session format: valid sessions, and errors for invalid lines."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_lab.workload.assets import bundled_sessions
from dps_lab.workload.sessions import (
    Session,
    SessionFormatError,
    Turn,
    load_sessions,
    parse_sessions,
)

HELLO = {"role": "user", "content": "hello"}
HI = {"role": "assistant", "content": "hi"}
TURN = {"messages": [HELLO], "answer": HI}


def test_each_line_is_a_session_and_blank_lines_are_skipped() -> None:
    line = {
        "id": "a",
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "system": "Be brief.",
        "turns": [TURN, TURN | {"think_seconds": 1.5, "max_tokens": 7}],
    }
    assert parse_sessions([json.dumps(line), "", " \n"]) == [
        Session(
            id="a",
            tools=[{"type": "function", "function": {"name": "f"}}],
            system="Be brief.",
            turns=[
                Turn(messages=[HELLO], answer=HI),
                Turn(messages=[HELLO], answer=HI, think_seconds=1.5, max_tokens=7),
            ],
        )
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "Invalid JSON: EOF while parsing an object at line 1 column 1"),
        ({"turns": [TURN]}, "id: Field required"),
        ({"id": "b", "turns": []}, "turns: List should have at least 1 item"),
        ({"id": "b", "turns": [TURN, {"messages": [HELLO]}]}, "turns[1].answer: Field required"),
        ({"id": "b", "turns": [TURN], "modle": "x"}, "modle: Extra inputs are not permitted"),
        ({"id": "a", "turns": [TURN]}, "id: 'a' is already used on line 1"),
    ],
)
def test_invalid_line_is_reported_with_its_key(line: str | dict[str, Any], complaint: str) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    with pytest.raises(SessionFormatError) as caught:
        parse_sessions([json.dumps({"id": "a", "turns": [TURN]}), text], "s.jsonl")
    assert str(caught.value).startswith(f"s.jsonl, line 2: {complaint}")


def test_prompts_contain_the_history_with_recorded_answers() -> None:
    session = Session(id="a", system="Be brief.", turns=[Turn(messages=[HELLO], answer=HI)] * 2)
    system = {"role": "system", "content": "Be brief."}
    assert list(session.prompts()) == [[system, HELLO], [system, HELLO, HI, HELLO]]


messages = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text()})
turns = st.builds(
    Turn,
    messages=st.lists(messages, min_size=1, max_size=3),
    answer=messages,
    think_seconds=st.floats(0, 10),
    max_tokens=st.none() | st.integers(1, 100),
)
sessions = st.builds(
    Session,
    id=st.text(min_size=1),
    tools=st.just([]),
    system=st.none() | st.text(),
    turns=st.lists(turns, min_size=1, max_size=4),
)


@given(st.lists(sessions, unique_by=lambda session: session.id, max_size=4))
def test_dumped_sessions_parse_to_equal_sessions(originals: list[Session]) -> None:
    assert parse_sessions([each.model_dump_json(exclude_defaults=True) for each in originals]) == originals


def test_bundled_sample_has_24_sessions_whose_results_match_their_calls() -> None:
    sample = load_sessions(bundled_sessions())
    assert len(sample) == 24
    for session in sample:
        for asking, telling in zip(session.turns[::2], session.turns[1::2], strict=True):
            assert [call["id"] for call in asking.answer["tool_calls"]] == [
                message["tool_call_id"] for message in telling.messages
            ]
