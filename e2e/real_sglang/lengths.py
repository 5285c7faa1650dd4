"""The prompt length in tokens that an engine reports in its answer."""

import json
from typing import Any


def reported_prompt_tokens(body: bytes, continuations: int = 1) -> int:
    """Prompt tokens of a complete answer, from its `usage` or SGLang's `meta_info` (summed over a batch).

    SGLang returns one entry with the prompt length for each of the `continuations` of a prompt; they count once.
    In a stream, the last reported length counts. Raises ValueError if no length is reported.
    """
    events = [json.loads(event) for event in stream_events(body)] or [json.loads(body)]
    lengths = [length for event in events if (length := _length(event)) is not None]
    if not lengths:
        raise ValueError(f"no prompt length in {body[:200]!r}")
    return lengths[-1] // continuations


def stream_events(body: bytes) -> list[bytes]:
    """Payloads of a server-sent event stream without `[DONE]`; empty if the body is not such a stream."""
    payloads = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [payload for payload in payloads if payload != b"[DONE]"]


def _length(answer: Any) -> int | None:
    if isinstance(answer, list):
        return sum(int(entry["meta_info"]["prompt_tokens"]) for entry in answer)
    usage = answer.get("message", answer).get("usage") or answer.get("meta_info") or {}
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    if (
        "input_tokens" in usage
    ):  # of the APIs of Anthropic, which counts cached tokens separately, and of OpenAI
        return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens", 0))
    return None
