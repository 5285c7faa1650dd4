"""Named requests that cover the ways in which a prompt can be given, to compare prompt lengths with the engine's.

The requests are those of the recording, in which further ones can be added by hand before it is repeated. They follow
the implementation in SGLang 0.5.23 (serving_chat.py). Prompts of /generate that crash the server are excluded
(README.md, "Requests that crash the engine").
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen2.5-7B-Instruct"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
FIXTURES = Path(__file__).parents[2] / "tests/gateway/fixtures"


@dataclass(frozen=True)
class PromptCase:
    """A request with a path and a JSON body that requests one output token."""

    name: str
    path: str
    body: Mapping[str, Any]


def recording(kind: str) -> Path:
    """The recording of this kind. Each of its lines has one request and what SGLang makes of it."""
    return FIXTURES / f"{kind}_sglang_0_5_23.json"


def recorded_bodies(kind: str) -> dict[str, dict[str, Any]]:
    """The requests of a recording, by name."""
    return {entry["name"]: entry["body"] for entry in json.loads(recording(kind).read_text())}


def write(kind: str, entries: list[dict[str, Any]]) -> None:
    """Replace a recording."""
    lines = [json.dumps(entry) for entry in entries]
    recording(kind).write_text("[\n" + ",\n".join(lines) + "\n]\n")


def prompt_cases() -> list[PromptCase]:
    """All requests."""
    entries = json.loads(recording("prompt_tokens").read_text())
    return [PromptCase(entry["name"], entry["path"], entry["body"]) for entry in entries]


def reported_prompt_tokens(case: PromptCase, body: bytes) -> int:
    """Prompt tokens of a complete answer, from its `usage` or SGLang's `meta_info` (summed over a batch).

    SGLang's /generate returns one entry with the prompt length for each continuation of a prompt; they count once. In a
    stream, the last reported length counts. Raises ValueError if no length is reported.
    """
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    events = [json.loads(line) for line in lines if line != b"[DONE]"] or [json.loads(body)]
    lengths = [length for event in events if (length := _length(event)) is not None]
    if not lengths:
        raise ValueError(f"no prompt length in {body[:200]!r}")
    return lengths[-1] // int(case.body.get("sampling_params", {}).get("n", 1))


def _length(answer: Any) -> int | None:
    if isinstance(answer, list):
        return sum(int(entry["meta_info"]["prompt_tokens"]) for entry in answer)
    usage = answer.get("message", answer).get("usage") or answer.get("meta_info") or {}
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    if (
        "input_tokens" in usage
    ):  # of Anthropic's API, which counts cached tokens separately, and of OpenAI's Responses
        return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens", 0))
    return None
