"""BFCL multi-turn (Patil et al., 2025) as sessions: 800 of them, 3,336 turns.

The data has user turns, the functions of each API and, for every turn, the calls that a right answer makes. A
session here is what an OpenAI client would send: the functions as tools, the user's messages, and the ground
truth as the assistant's side.

What the benchmark leaves to the harness is done as its own harness does it (bfcl_eval.model_handler.utils):
types in JSON Schema's names, the `response` schema told in the description, and one fixed user message where
a turn brings new functions instead of words. The answer is text in the benchmark's own format,
`[f(a=1), g(b='x')]`, or a message with `tool_calls`.

As SGLang 0.5.23 renders them for Qwen2.5 and with answers as text, ΔL is 25 to 8,167 tokens with a median
of 75, L is 3,718 to 8,444, and 72.4 % of the turns have ΔL <= 128; the paper's Table 2 implies about 72 %.
Answers as tool calls take more tokens: 27 to 8,167, median 99, 64.8 %. The prompts at their barest (documents as
they are in the files, no message where a turn has none, 23 tokens for every answer) give 28 to 7,488, median
69, L 3,394 to 7,771, and 75.2 %.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dps_lab.workload.sessions import Message, Session, Turn

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")

FUNCTION_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}

NEW_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"
"""What BFCL's harness says where a turn has no user message."""

NO_CALL = "None of the functions can do this with what is given so far."
"""The answer where the ground truth is not to call anything: a parameter or a function is missing."""

_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}

AnswerStyle = Literal["text", "tool_calls"]


def load_bfcl(folder: Path, answers: AnswerStyle = "text") -> list[Session]:
    """The sessions of BFCL's multi-turn categories, in the files' order.

    folder: as `assets.bfcl` brings it. Raises OSError or ValueError when the files are not BFCL's.
    """
    functions = {
        name: [_function(document) for document in _lines(folder / "multi_turn_func_doc" / f"{file}.json")]
        for name, file in FUNCTION_FILES.items()
    }
    return [session for category in CATEGORIES for session in _category(folder, category, functions, answers)]


def _category(
    folder: Path, category: str, functions: Mapping[str, Sequence[dict[str, Any]]], answers: AnswerStyle
) -> Iterator[Session]:
    file = f"BFCL_v4_multi_turn_{category}.json"
    truths = {entry["id"]: entry["ground_truth"] for entry in _lines(folder / "possible_answer" / file)}
    for entry in _lines(folder / file):
        used = [function for name in entry["involved_classes"] for function in functions[name]]
        parameters = {function["name"]: list(function["parameters"]["properties"]) for function in used}
        yield Session(
            id=entry["id"],
            tools=[{"type": "function", "function": function} for function in used],
            turns=[
                Turn(
                    messages=messages or [{"role": "user", "content": NEW_FUNCTIONS}],
                    answer=_text_answer(calls)
                    if answers == "text"
                    else _call_answer(calls, number, parameters),
                )
                for number, (messages, calls) in enumerate(
                    zip(entry["question"], truths[entry["id"]], strict=True)
                )
            ],
        )


def _text_answer(calls: Sequence[str]) -> Message:
    return {"role": "assistant", "content": f"[{', '.join(calls)}]" if calls else NO_CALL}


def _call_answer(calls: Sequence[str], turn: int, parameters: Mapping[str, Sequence[str]]) -> Message:
    if not calls:
        return {"role": "assistant", "content": NO_CALL}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": f"call_{turn}_{index}", "type": "function", "function": _call(call, parameters)}
            for index, call in enumerate(calls)
        ],
    }


def _call(source: str, parameters: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The OpenAI form of a call that the ground truth writes in Python: `sort('final_report.pdf')`."""
    call = ast.parse(source, mode="eval").body
    if not isinstance(call, ast.Call):
        raise ValueError(f"not a call: {source}")
    name = ast.unparse(call.func)
    arguments = dict(zip(parameters[name], map(ast.literal_eval, call.args), strict=False))
    arguments |= {
        keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg is not None
    }
    return {"name": name, "arguments": json.dumps(arguments)}


def _function(document: Mapping[str, Any]) -> dict[str, Any]:
    response = json.dumps(document["response"])
    return {
        "name": document["name"],
        "description": f"{document['description']} The response field has the following schema: {response}",
        "parameters": _json_schema(document["parameters"]),
    }


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema with JSON Schema's names of types, which servers check."""
    result: dict[str, Any] = dict(schema)
    if "type" in schema:
        result["type"] = _JSON_TYPES.get(schema["type"], schema["type"])
    if "properties" in schema:
        result["properties"] = {key: _json_schema(value) for key, value in schema["properties"].items()}
    if "items" in schema:
        result["items"] = _json_schema(schema["items"])
    return result


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
