"""Which streams another engine can continue, with which request, and how the two parts become one answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.api import continuation
from dps_gateway.api.continuation import Continuation, Recorder
from dps_gateway.api.endpoints.base import DeliveredText, NotContinuable, TextEndpoint
from dps_gateway.api.endpoints.generate import GENERATE
from dps_gateway.api.endpoints.openai import CHAT, COMPLETIONS
from dps_gateway.engine.usage import Usage

HELLO = {"role": "user", "content": "hello"}
CHAT_BODY: dict[str, Any] = {"messages": [HELLO]}
COMPLETION_BODY: dict[str, Any] = {"prompt": "hello"}
GENERATE_BODY: dict[str, Any] = {"text": "hello"}
DONE = b"data: [DONE]\n\n"


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def documents(events: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in events.split(b"\n\n") if line and line != DONE.strip()]


def delta(name: str = "first", finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"id": name, "choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def generated(text: str, name: str = "first", finish: Any = None, **fields: Any) -> dict[str, Any]:
    meta = {"id": name, "finish_reason": finish, "prompt_tokens": 4, "completion_tokens": len(text)}
    return {"text": text, "meta_info": meta, **fields}


def received(stream: TextEndpoint, *events: Any) -> DeliveredText:
    recorder = Recorder(stream)
    for each in events:
        recorder.add(event(each))
    return recorder.received()


CONTINUABLE: dict[str, tuple[TextEndpoint, dict[str, Any], bool]] = {
    "chat": (CHAT, CHAT_BODY, True),
    "sampled": (CHAT, CHAT_BODY | {"temperature": 1, "n": 1, "logprobs": False}, True),
    "tools": (CHAT, CHAT_BODY | {"tools": [{}], "tool_choice": "auto"}, True),
    "format text": (CHAT, CHAT_BODY | {"response_format": {"type": "text"}}, True),
    "begun answer": (
        CHAT,
        {"messages": [HELLO, {"role": "assistant", "content": "a"}], "continue_final_message": True},
        True,
    ),
    "assistant last": (CHAT, {"messages": [HELLO, {"role": "assistant", "content": "a"}]}, False),
    "no messages": (CHAT, {"messages": []}, False),
    "two answers": (CHAT, CHAT_BODY | {"n": 2}, False),
    "logprobs": (CHAT, CHAT_BODY | {"logprobs": True}, False),
    "grammar": (CHAT, CHAT_BODY | {"response_format": {"type": "json_object"}}, False),
    "regex": (CHAT, CHAT_BODY | {"regex": "a+"}, False),
    "forced tool": (CHAT, CHAT_BODY | {"tools": [{}], "tool_choice": "required"}, False),
    "named tool": (CHAT, CHAT_BODY | {"tool_choice": {"type": "function"}}, False),
    "tokenized chat": (CHAT, CHAT_BODY | {"input_ids": [1]}, False),
    "completion": (COMPLETIONS, COMPLETION_BODY, True),
    "several prompts": (COMPLETIONS, {"prompt": ["a", "b"]}, False),
    "tokenized prompt": (COMPLETIONS, {"prompt": [1, 2]}, False),
    "echo": (COMPLETIONS, COMPLETION_BODY | {"echo": True}, False),
    "logprobs of generated tokens": (COMPLETIONS, COMPLETION_BODY | {"logprobs": 0}, False),
    "generate": (GENERATE, GENERATE_BODY | {"sampling_params": {"temperature": 1}}, True),
    "two samples": (GENERATE, GENERATE_BODY | {"sampling_params": {"n": 2}}, False),
    "batch": (GENERATE, {"text": ["a", "b"]}, False),
    "return_logprob": (GENERATE, GENERATE_BODY | {"return_logprob": True}, False),
}


@pytest.mark.parametrize(("stream", "body", "expected"), CONTINUABLE.values(), ids=CONTINUABLE.keys())
def test_continuable_requests(stream: TextEndpoint, body: dict[str, Any], expected: bool) -> None:
    assert stream.continuable(body) is expected


@pytest.mark.parametrize(
    ("stream", "document"),
    [
        (CHAT, delta(tool_calls=[{"index": 0}])),
        (CHAT, delta(reasoning_content="hm")),
        (CHAT, delta(reasoning="hm")),
        (CHAT, {"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [1]}]}),
        (CHAT, {"choices": [{"index": 1, "delta": {"content": "a"}}]}),
        (CHAT, {"choices": [{"index": 0, "delta": None}]}),
        (CHAT, delta(content=["a"])),
        (CHAT, {"error": {"message": "no"}}),
        (CHAT, ["a"]),
        (COMPLETIONS, {"choices": [{"index": 0, "text": "a", "logprobs": {"tokens": ["a"]}}]}),
        (GENERATE, generated("b")),
        (GENERATE, {"text": None, "meta_info": {}}),
    ],
)
def test_streams_with_something_other_than_text_are_not_continued(
    stream: TextEndpoint, document: Any
) -> None:
    begin = generated("a") if stream is GENERATE else {"choices": []}
    with pytest.raises(NotContinuable):
        received(stream, begin, document)


def test_very_long_streams_are_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "MAX_CHARS", 10)
    with pytest.raises(NotContinuable):
        received(CHAT, delta(content="a" * 11))


@given(st.lists(st.text(max_size=5)), st.integers(1, 200))
def test_received_text_does_not_depend_on_when_events_are_read(parts: list[str], unread: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuation, "MAX_UNREAD_BYTES", unread)
        assert received(CHAT, *(delta(content=part) for part in parts)).text == "".join(parts)


BEGUN = [HELLO, {"role": "assistant", "content": "a b"}]
CONTINUED = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
REQUESTS: dict[str, tuple[TextEndpoint, dict[str, Any], dict[str, Any] | None]] = {
    "chat": (CHAT, CHAT_BODY, CONTINUED),
    "limits": (
        CHAT,
        CHAT_BODY | {"max_tokens": 10, "max_completion_tokens": 9, "min_tokens": 1, "stop": ["c"], "seed": 1},
        CONTINUED | {"max_tokens": 8, "max_completion_tokens": 7, "min_tokens": 0, "stop": ["c"], "seed": 1},
    ),
    "begun answer": (
        CHAT,
        {
            "messages": [HELLO, {"role": "assistant", "content": "0 "}],
            "continue_final_message": True,
        },
        CONTINUED | {"messages": [HELLO, {"role": "assistant", "content": "0 a b"}]},
    ),
    "nothing left": (CHAT, CHAT_BODY | {"max_tokens": 2}, None),
    "completion": (COMPLETIONS, COMPLETION_BODY, {"prompt": "helloa b", "max_tokens": 14}),
    "generate": (GENERATE, GENERATE_BODY, {"text": "helloa b", "sampling_params": {"max_new_tokens": 126}}),
    "nothing left to generate": (
        GENERATE,
        GENERATE_BODY | {"sampling_params": {"max_new_tokens": 1}},
        None,
    ),
}


@pytest.mark.parametrize(("stream", "body", "expected"), REQUESTS.values(), ids=REQUESTS.keys())
def test_request_for_the_rest(
    stream: TextEndpoint, body: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    before = json.dumps(body)
    assert stream.rest_request(body, "a b", tokens=2) == expected
    assert json.dumps(body) == before


@pytest.mark.parametrize(("stop", "lost"), [("bc", True), (["x", "b\n"], True), ("c", False), ([], False)])
def test_beginning_of_a_stop_string_is_not_continued(stop: Any, lost: bool) -> None:
    if lost:
        with pytest.raises(NotContinuable):
            CHAT.rest_request(CHAT_BODY | {"stop": stop}, "a b", tokens=2)
    else:
        assert CHAT.rest_request(CHAT_BODY | {"stop": stop}, "a b", tokens=2)


def test_events_of_generate_repeat_the_whole_answer() -> None:
    part = received(GENERATE, generated("a", output_ids=[7]))
    rest = Continuation(GENERATE, part, tokens=1, prompt_tokens=4)
    second = generated("b", "second", output_ids=[8])
    second["meta_info"] |= {"prompt_tokens": 5, "cached_tokens": 5}
    expected = generated("ab", output_ids=[7, 8])
    expected["meta_info"] |= {"cached_tokens": 4}
    assert documents(rest.feed(event(second))) == [expected]


@pytest.mark.parametrize(("prompt", "expected"), [(9, 9), (None, 8)])
def test_usage_is_that_of_one_answer(prompt: int | None, expected: int) -> None:
    rest = Continuation(CHAT, DeliveredText(), tokens=4, prompt_tokens=prompt)
    whole = rest.usage(Usage(12, 5, cached_tokens=12, fetched_tokens=10, finish_reason="stop"))
    assert whole == Usage(expected, 9, expected, min(10, expected), finish_reason="stop")


def test_answer_without_a_rest_is_ended() -> None:
    choice = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    counts = {"usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}}
    cut = received(CHAT, delta(content="a"))
    complete = received(CHAT, delta(content="a"), delta(finish="stop"))
    whole = received(GENERATE, generated("a", finish={"type": "stop"}))
    short = received(GENERATE, generated("a"))
    assert documents(CHAT.ending(cut, None)) == [{"id": "first", **choice}]
    assert documents(CHAT.ending(complete, Usage(9, 2))) == [{"id": "first", "choices": [], **counts}]
    assert (CHAT.ending(complete, None), GENERATE.ending(whole, None)) == (DONE, DONE)
    assert documents(GENERATE.ending(short, None)) == [generated("a", finish={"type": "length", "length": 1})]
