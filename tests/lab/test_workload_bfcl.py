"""Conversion of BFCL's files to sessions."""

import json
from pathlib import Path
from typing import Any

import pytest

from dps_gateway.cache_dir import cache_dir
from dps_lab.workload.assets import BFCL_VERSION
from dps_lab.workload.bfcl import CATEGORIES, FUNCTION_FILES, NEW_FUNCTIONS, NO_CALL, load_bfcl
from dps_lab.workload.sessions import Session, Turn

REAL = cache_dir() / f"bfcl-eval-{BFCL_VERSION}"

SORT = {
    "name": "sort",
    "description": "Sorts a file.",
    "parameters": {
        "type": "dict",
        "properties": {
            "file_name": {"type": "string"},
            "weights": {"type": "array", "items": {"type": "float"}},
        },
        "required": ["file_name"],
    },
    "response": {"type": "dict", "properties": {"sorted": {"type": "string"}}},
}
SORT_TOOL = {
    "type": "function",
    "function": {
        "name": "sort",
        "description": "Sorts a file. The response field has the following schema: "
        '{"type": "dict", "properties": {"sorted": {"type": "string"}}}',
        "parameters": {
            "type": "object",
            "properties": {
                "file_name": {"type": "string"},
                "weights": {"type": "array", "items": {"type": "number"}},
            },
            "required": ["file_name"],
        },
    },
}
ASK = {"role": "user", "content": "Sort a.txt."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A session of three turns: two calls, no call, and a turn that only adds functions."""

    def write(path: str, *lines: Any) -> None:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("".join(json.dumps(line) + "\n" for line in lines))

    for file in FUNCTION_FILES.values():
        write(f"multi_turn_func_doc/{file}.json", *([SORT] if file == "gorilla_file_system" else []))
    for category in CATEGORIES:
        write(f"BFCL_v4_multi_turn_{category}.json")
        write(f"possible_answer/BFCL_v4_multi_turn_{category}.json")
    question = {"id": "m_0", "question": [[ASK], [ASK], []], "involved_classes": ["GorillaFileSystem"]}
    truth = [["sort('a.txt')", "sort(file_name='b.txt', weights=[0.5])"], [], ["sort('a.txt')"]]
    write("BFCL_v4_multi_turn_base.json", question)
    write("possible_answer/BFCL_v4_multi_turn_base.json", {"id": "m_0", "ground_truth": truth})
    return tmp_path


ANSWERS = [
    {"role": "assistant", "content": "[sort('a.txt'), sort(file_name='b.txt', weights=[0.5])]"},
    {"role": "assistant", "content": NO_CALL},
    {"role": "assistant", "content": "[sort('a.txt')]"},
]


def test_session_has_json_schema_tools_and_the_ground_truth_as_answers(folder: Path) -> None:
    asked = [[ASK], [ASK], [{"role": "user", "content": NEW_FUNCTIONS}]]
    turns = [Turn(messages=messages, answer=answer) for messages, answer in zip(asked, ANSWERS, strict=True)]
    assert load_bfcl(folder) == [Session(id="m_0", tools=[SORT_TOOL], turns=turns)]


@pytest.mark.skipif(not REAL.is_dir(), reason="BFCL is not in the cache: python -m dps_lab.workload.assets")
def test_real_data_has_800_sessions_and_3336_turns() -> None:
    sessions = load_bfcl(REAL)
    assert (len(sessions), sum(len(session.turns) for session in sessions)) == (800, 3336)
