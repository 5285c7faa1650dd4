"""Continuing a stream with the answer of another engine: what the client receives."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.api import continuation
from dps_gateway.api.continuation import Received
from dps_gateway.api.endpoints import chat, completions, generate, messages, responses
from dps_gateway.api.endpoints.route import Route
from dps_gateway.engine.stream_content import (
    CHAT_STREAMS,
    COMPLETION_STREAMS,
    GENERATE_STREAMS,
    MESSAGE_STREAMS,
    Different,
    StreamContent,
)

Document = dict[str, Any]
Answer = tuple[str, str]
"""The reasoning and the content of an answer."""


def event(document: Document, kind: str = "") -> bytes:
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {json.dumps(document)}\n\n".encode()


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """The text, divided at these positions."""
    ends = [*sorted({cut % (len(text) + 1) for cut in cuts} | {len(text)})]
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def chunk(delta: Document | None = None, finish: str | None = None, answer: str = "first") -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    usage = {"prompt_tokens": 1, "completion_tokens": 2} if delta is None else None
    return event({"id": answer, "created": len(answer), "choices": choices, "usage": usage})


def chat_stream(answer: Answer, cuts: Sequence[int], name: str) -> list[bytes]:
    reasoning, content = answer
    return [
        chunk({"role": "assistant", "content": ""}, answer=name),
        *(chunk({"reasoning_content": text}, answer=name) for text in pieces(reasoning, cuts)),
        *(chunk({"content": text}, answer=name) for text in pieces(content, cuts)),
        chunk({}, "stop", name),
        chunk(answer=name),
    ]


def completion_stream(answer: Answer, cuts: Sequence[int], name: str) -> list[bytes]:
    texts = pieces("".join(answer), cuts)
    choices = [
        {"index": 0, "text": text, "finish_reason": "length" if number == len(texts) else None}
        for number, text in enumerate(texts, 1)
    ]
    return [event({"id": name, "created": len(name), "choices": [choice]}) for choice in choices]


def generate_stream(answer: Answer, cuts: Sequence[int], name: str) -> list[bytes]:
    text = "".join(answer)
    ends = [len("".join(pieces(text, cuts)[: count + 1])) for count in range(len(pieces(text, cuts)))]
    return [
        event(
            {
                "text": text[:end],
                "output_ids": list(range(end)),
                "meta_info": {
                    "id": name,
                    "completion_tokens": end,
                    "finish_reason": {"type": "length"} if end == len(text) else None,
                },
            }
        )
        for end in ends
    ]


def message_stream(answer: Answer, cuts: Sequence[int], name: str) -> list[bytes]:
    def part(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    def block(index: int, kind: str, text: str) -> list[bytes]:
        deltas = [{"type": f"{kind}_delta", kind: piece} for piece in pieces(text, cuts)]
        return [
            part("content_block_start", index=index, content_block={"type": kind, kind: ""}),
            *(part("content_block_delta", index=index, delta=delta) for delta in deltas),
            part("content_block_stop", index=index),
        ]

    return [
        part("message_start", message={"id": name, "usage": {"input_tokens": 1}}),
        part("ping"),
        *block(0, "thinking", answer[0]),
        *block(1, "text", answer[1]),
        part("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2}),
    ]


def vllm_chat_stream(answer: Answer, cuts: Sequence[int], name: str) -> list[bytes]:
    """vLLM's name for reasoning_content is `reasoning`."""
    return [each.replace(b"reasoning_content", b"reasoning") for each in chat_stream(answer, cuts, name)]


Stream = Callable[[Answer, Sequence[int], str], list[bytes]]
FORMATS: dict[str, tuple[StreamContent, Stream]] = {
    "chat": (CHAT_STREAMS, chat_stream),
    "chat of vLLM": (CHAT_STREAMS, vllm_chat_stream),
    "completions": (COMPLETION_STREAMS, completion_stream),
    "generate": (GENERATE_STREAMS, generate_stream),
    "messages": (MESSAGE_STREAMS, message_stream),
}


def documents(events: bytes) -> list[Document]:
    return [
        json.loads(line.removeprefix("data: "))
        for line in events.decode().splitlines()
        if line.startswith("data: ")
    ]


def read(events: bytes) -> list[tuple[str, str]]:
    """What a client makes of the events: the text of each field in order, and every ending."""
    result: list[tuple[str, str]] = []

    def add(field: str, text: str) -> None:
        if result and result[-1][0] == field:
            result[-1] = (field, result[-1][1] + text)
        elif text:
            result.append((field, text))

    for document in documents(events):
        if document.get("usage") and document.get("choices") == []:
            result.append(("usage", ""))
        for choice in document.get("choices", []):
            for field in ("reasoning_content", "reasoning"):
                add(field, choice.get("delta", {}).get(field) or "")
            add("content", choice.get("delta", {}).get("content") or choice.get("text") or "")
            if choice["finish_reason"]:
                result.append(("finish", choice["finish_reason"]))
        if "meta_info" in document:
            result = [(field, text) for field, text in result if field != "text"]
            result.append(("text", document["text"]))
            if document["meta_info"]["finish_reason"]:
                result.append(("finish", "length"))
        if "type" in document and document["type"] not in ("content_block_delta", "ping"):
            result.append((document["type"], str(document.get("index"))))
        for text in document.get("delta", {}).values() if "type" in document else ():
            add("block", text if text not in ("thinking_delta", "text_delta") else "")
    return result


texts = st.text(st.sampled_from("aab é😀\n"), max_size=30)
answers = st.tuples(texts, texts).filter(lambda answer: "".join(answer) != "")
cuts = st.lists(st.integers(0, 40), max_size=12)
formats = st.sampled_from(sorted(FORMATS))


@given(
    formats, answers, cuts, cuts, st.integers(0, 80), st.integers(1, 500), st.sampled_from([0, 300, 131072])
)
def test_client_receives_the_answer_once_however_it_is_divided(
    name: str, answer: Answer, first: list[int], other: list[int], broken: int, size: int, unread: int
) -> None:
    """The first engine fails after any event; the events of the other one arrive in pieces of any size."""
    content, stream = FORMATS[name]
    events = stream(answer, first, "first")
    whole = b"".join(events)
    received, sent = Received(content), b""
    with patch.object(continuation, "MAX_UNREAD_BYTES", unread):
        for each in events[: broken % (len(events) + 1)]:
            received.add(each)
            sent += each
    continued = received.continuation()
    assert continued is not None
    again = stream(answer, other, "the other")
    sent += b"".join(
        continued.feed(b"".join(again[start : start + size])) for start in range(0, len(again), size)
    )

    assert continued.caught_up
    assert read(sent) == read(whole)
    ids = {document.get("id") or document.get("meta_info", {}).get("id") for document in documents(sent)}
    assert len(ids - {None}) <= 1


@given(formats, answers, answers, cuts, cuts, st.integers(0, 80))
def test_other_answer_adds_nothing_unless_it_begins_with_what_was_received(
    name: str, answer: Answer, different: Answer, first: list[int], other: list[int], broken: int
) -> None:
    content, stream = FORMATS[name]
    events = stream(answer, first, "first")
    received = Received(content)
    sent = b"".join(events[: broken % (len(events) + 1)])
    received.add(sent)
    continued = received.continuation()
    assert continued is not None
    whole = b"".join(stream(different, other, "the other"))
    added = b""
    try:
        for each in stream(different, other, "the other"):
            added += continued.feed(each)
    except Different:
        assert added == b""
    if added or continued.caught_up:
        assert read(sent + added) == read(whole)


HELLO = chunk({"role": "assistant", "content": ""}) + chunk({"content": "Hel"})


def continued_with(*events: bytes, received: bytes = HELLO, content: StreamContent = CHAT_STREAMS) -> bytes:
    client = Received(content)
    client.add(received)
    rest = client.continuation()
    assert rest is not None
    return rest.feed(b"".join(events))


def test_events_of_the_other_answer_get_the_id_and_the_time_of_the_first() -> None:
    new = continued_with(
        chunk({"role": "assistant", "content": ""}, answer="the other"),
        chunk({"content": "Hello"}, answer="the other"),
        chunk({"content": " you"}, answer="the other"),
        chunk({}, "stop", answer="the other"),
    )
    assert documents(new) == documents(
        chunk({"content": "lo"}) + chunk({"content": " you"}) + chunk({}, "stop")
    )


@pytest.mark.parametrize(
    "other",
    [
        chunk({"content": "Hal"}),
        chunk({"content": "He"}) + chunk({"content": "y"}),
        chunk({"reasoning_content": "Hello"}),
        chunk({"content": "He"}) + chunk({}, "stop"),
        chunk({"content": "He", "tool_calls": [{"index": 0, "function": {"name": "f"}}]}),
        event({"error": {"message": "out of memory"}}),
        event({"choices": [{"index": 1, "delta": {"content": "Hel"}}]}),
        event({"choices": [{"index": 0, "delta": {"content": ["Hel"]}}]}),
        chunk({"reasoning": "Hm", "reasoning_content": "Ha"}),
        b"data: {{{\n\n",
        b"data: [1]\n\n",
        b"\xff\xfe\n\ndata: \xff\n\n",
    ],
)
def test_answer_that_differs_is_not_forwarded(other: bytes) -> None:
    with pytest.raises(Different):
        continued_with(other)


def test_reasoning_in_two_fields_is_continued_in_both() -> None:
    """As vLLM 0.12 sends it."""
    first = chunk({"reasoning": "Hm", "reasoning_content": "Hm"})
    other = chunk({"reasoning": "Hmm", "reasoning_content": "Hmm"})
    assert documents(continued_with(other, received=first)) == documents(
        chunk({"reasoning": "m", "reasoning_content": "m"})
    )


def test_events_after_the_answer_are_not_sent_twice() -> None:
    after = [chunk({}, "stop"), event({"choices": [], "sglext": {"cached": 1}}), chunk()]
    assert continued_with(HELLO, *after, received=HELLO + b"".join(after)) == b""
    rest = continued_with(HELLO, *after, received=HELLO + after[0] + after[1])
    assert documents(rest) == documents(after[2])


def test_comments_are_neither_compared_nor_lost() -> None:
    later = chunk({"content": " you"})
    assert b": working\n\n" in continued_with(
        b": waiting\n\n", chunk({"content": "Hello"}), b": working\n\n", later
    )
    assert b"waiting" not in continued_with(b": waiting\n\n", chunk({"content": "Hello"}))


def test_later_events_that_are_not_json_are_forwarded_as_they_are() -> None:
    assert continued_with(chunk({"content": "Hello"}), b"data: {{{\r\n\r\n").endswith(b"data: {{{\r\n\r\n")


def call(index: int = 0, name: str | None = None, arguments: str = "", id: str | None = None) -> bytes:
    function = {"name": name, "arguments": arguments}
    return chunk({"tool_calls": [{"index": index, "id": id, "function": function}]})


def test_tool_calls_are_continued_with_the_ids_that_the_client_knows() -> None:
    first = call(name="find", id="call_1") + call(arguments='{"x"')
    new = documents(
        continued_with(
            call(name="find", arguments='{"x": 1}', id="call_8"),
            call(1, "open", id="call_9"),
            received=first,
        )
    )
    calls = [document["choices"][0]["delta"]["tool_calls"][0] for document in new]
    assert calls == [
        {"index": 0, "id": None, "function": {"name": None, "arguments": ": 1}"}},
        {"index": 1, "id": "call_9", "function": {"name": "open", "arguments": ""}},
    ]


@pytest.mark.parametrize(
    "other",
    [call(name="find_all"), call(name="f"), call(1, "find"), call(name="find", arguments="{}")],
)
def test_different_tool_call_is_not_forwarded(other: bytes) -> None:
    with pytest.raises(Different):
        continued_with(other, received=call(name="find", id="call_1") + call(arguments='{"x"'))


@pytest.mark.parametrize(
    ("content", "events"),
    [
        (CHAT_STREAMS, b"data: {{{\n\n"),
        (CHAT_STREAMS, event({"choices": [{"index": 1, "delta": {"content": "b"}}]})),
        (CHAT_STREAMS, chunk({"hidden_states": [0.5]})),
        # vLLM with return_token_ids
        (CHAT_STREAMS, event({"choices": [{"index": 0, "delta": {"content": "b"}, "token_ids": [2]}]})),
        (COMPLETION_STREAMS, event({"choices": [{"index": 0, "text": "b", "token_ids": [2]}]})),
        (
            MESSAGE_STREAMS,
            event({"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta"}}),
        ),
        # SGLang with --incremental-streaming-output
        (
            GENERATE_STREAMS,
            event(
                {"text": "b", "output_ids": [2], "meta_info": {"completion_tokens": 2, "finish_reason": None}}
            ),
        ),
        # --skip-tokenizer-init
        (
            GENERATE_STREAMS,
            event({"output_ids": [1], "meta_info": {"completion_tokens": 1, "finish_reason": None}}),
        ),
    ],
)
def test_stream_with_events_that_cannot_be_compared_is_not_continued(
    content: StreamContent, events: bytes
) -> None:
    received = Received(content)
    received.add(events)
    assert received.continuation() is None


def test_longest_stream_that_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "MAX_CHARS", 1000)
    monkeypatch.setattr(continuation, "MAX_UNREAD_BYTES", 100)
    received = Received(CHAT_STREAMS)
    for _ in range(100):
        received.add(chunk({"content": "x" * 10}))
    assert received.continuation() is not None
    received.add(chunk({"content": "x"}))
    assert received.continuation() is None
    assert received._texts == []
    assert received._unread == []


GREEDY = {"temperature": 0}


@pytest.mark.parametrize(
    ("route", "body", "expected"),
    [
        (chat.ROUTE, {}, False),
        (chat.ROUTE, {"temperature": 0.0}, True),
        (chat.ROUTE, {"temperature": None}, False),
        (chat.ROUTE, {"temperature": 1e-9}, False),
        (chat.ROUTE, {"top_k": 1}, True),
        (chat.ROUTE, {"top_k": -1}, False),
        (chat.ROUTE, GREEDY | {"n": 1}, True),
        (chat.ROUTE, GREEDY | {"n": 2}, False),
        (chat.ROUTE, GREEDY | {"logprobs": True}, False),
        (chat.ROUTE, GREEDY | {"logprobs": False}, True),
        (completions.ROUTE, GREEDY, True),
        (completions.ROUTE, GREEDY | {"logprobs": 0}, False),
        (messages.ROUTE, GREEDY, True),
        (messages.ROUTE, {}, False),
        (generate.ROUTE, GREEDY, False),
        (generate.ROUTE, {"sampling_params": GREEDY}, True),
        (generate.ROUTE, {"sampling_params": GREEDY | {"n": 2}}, False),
        (generate.ROUTE, {"sampling_params": [GREEDY]}, False),
        (generate.ROUTE, {"sampling_params": GREEDY, "return_logprob": True}, False),
    ],
)
def test_deterministic_requests(route: Route, body: Document, expected: bool) -> None:
    assert route.stream_content is not None
    assert route.stream_content.deterministic(body) is expected


def test_responses_are_not_continued() -> None:
    assert responses.ROUTE.stream_content is None


names = st.sampled_from(
    [
        "choices",
        "index",
        "delta",
        "content",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "finish_reason",
        "type",
        "text",
        "output_ids",
        "meta_info",
        "completion_tokens",
        "content_block",
        "stop_reason",
        "id",
        "text_delta",
        "content_block_delta",
        "message_delta",
    ]
)
values = st.recursive(
    names | st.integers(0, 1) | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=6),
)


@given(formats, st.dictionaries(names, values, max_size=6))
def test_any_event_is_compared_or_different(name: str, document: Document) -> None:
    try:
        for part in FORMATS[name][0].reader()(document):
            part.cut("")
            assert part.text
    except Different:
        pass
