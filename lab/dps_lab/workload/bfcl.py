"""BFCL multi-turn (Patil et al., 2025) as sessions: 800 of them, 3,336 turns.

The data has user messages, the functions of each API and, for every turn, the calls of a correct answer. A
session contains what an OpenAI client would send: the functions as tools, the user messages, and the ground
truth as the assistant's answers.

Details follow the benchmark's own harness (bfcl_eval.model_handler.utils): types have JSON Schema's names, the
description includes the `response` schema, and a fixed user message is sent where a turn adds functions
instead of a message. An answer is text in the benchmark's format, `[f(a=1), g(b='x')]`.

As rendered by SGLang 0.5.23 for Qwen2.5, ΔL is between 25 and 8,167 tokens with a median of 75, L is between 3,718
and 8,444, and 72.4% of the turns have ΔL <= 128; the paper's Table 2 implies about 72%. With minimal prompts (function
documents unchanged, no message for turns without one, 23 tokens per answer), ΔL is between 28 and 7,488 with a median
of 69, L is between 3,394 and 7,771, and the share is 75.2%.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dps_lab.workload.sessions import Session, Turn

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
"""The user message that BFCL's harness sends if a turn has none."""

NO_CALL = "None of the functions can do this with what is given so far."
"""The answer if the ground truth has no call, because a parameter or a function is missing."""

_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


def load_bfcl(folder: Path) -> list[Session]:
    """The sessions of BFCL's multi-turn categories, in file order.

    folder: the folder from `assets.bfcl`. Raises OSError or ValueError if files are missing or invalid.
    """
    functions = {
        name: [_function(document) for document in _lines(folder / "multi_turn_func_doc" / f"{file}.json")]
        for name, file in FUNCTION_FILES.items()
    }
    return [session for category in CATEGORIES for session in _category(folder, category, functions)]


def _category(
    folder: Path, category: str, functions: Mapping[str, Sequence[dict[str, Any]]]
) -> Iterator[Session]:
    file = f"BFCL_v4_multi_turn_{category}.json"
    truths = {entry["id"]: entry["ground_truth"] for entry in _lines(folder / "possible_answer" / file)}
    for entry in _lines(folder / file):
        used = [function for name in entry["involved_classes"] for function in functions[name]]
        yield Session(
            id=entry["id"],
            tools=[{"type": "function", "function": function} for function in used],
            turns=[
                Turn(
                    messages=messages or [{"role": "user", "content": NEW_FUNCTIONS}],
                    answer={"role": "assistant", "content": f"[{', '.join(calls)}]" if calls else NO_CALL},
                )
                for messages, calls in zip(entry["question"], truths[entry["id"]], strict=True)
            ],
        )


def _function(document: Mapping[str, Any]) -> dict[str, Any]:
    response = json.dumps(document["response"])
    return {
        "name": document["name"],
        "description": f"{document['description']} The response field has the following schema: {response}",
        "parameters": _json_schema(document["parameters"]),
    }


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same schema with JSON Schema's type names, which servers validate."""
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
