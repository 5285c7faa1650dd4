"""The prompt length that an engine itself reports in an answer, in tokens."""

import json
from typing import Any


def reported_prompt_tokens(body: bytes, continuations: int = 1) -> int:
    """Prompt tokens of a whole answer: OpenAI's ``usage``, or SGLang's ``meta_info`` (a batch is summed).

    SGLang answers ``continuations`` of one prompt as so many entries, each with its length: they count once.
    A stream's last event that tells a length counts. Raises ValueError where the answer tells none.
    """
    events = [json.loads(event) for event in stream_events(body)] or [json.loads(body)]
    told = [length for event in events if (length := _told(event)) is not None]
    if not told:
        raise ValueError(f"no prompt length in {body[:200]!r}")
    return told[-1] // continuations


def stream_events(body: bytes) -> list[bytes]:
    """Payloads of a server-sent event stream without ``[DONE]``; none where the body is not such a stream."""
    payloads = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line.startswith(b"data: ")]
    return [payload for payload in payloads if payload != b"[DONE]"]


def _told(answer: Any) -> int | None:
    if isinstance(answer, list):
        return sum(int(entry["meta_info"]["prompt_tokens"]) for entry in answer)
    told = answer.get("usage") or answer.get("meta_info")
    return int(told["prompt_tokens"]) if told else None
