"""Reading usage from answers, and relaying events byte for byte."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.api.body import Body
from dps_gateway.api.endpoints.base import Endpoint
from dps_gateway.api.endpoints.generate import GENERATE
from dps_gateway.api.endpoints.messages import MESSAGES
from dps_gateway.api.endpoints.openai import CHAT, DRAFTS_FIELD, SOURCES_FIELD, USAGE_FIELD, without_details
from dps_gateway.api.endpoints.responses import RESPONSES
from dps_gateway.api.sse import EventRelay
from dps_gateway.engine.usage import Usage

ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant"}}],"usage":null}\n\n'
TEXT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"\\"usage\\":{ is just text"}}]}\n\n'
USAGE = (
    b'data: {"id":"c","model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,'
    b'"prompt_tokens_details":{"cached_tokens":7}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
SOURCES = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"choices":[],"model":"m","usage":null,'
    b'"sglext":{"cached_tokens_details":{"device":2,"host":1,"storage":4,"storage_backend":"SharedPrefixCache"}}}\n\n'
)
OTHERS = (
    b'data: {"choices":[],"sglext":{"cached_tokens_details":{"device":2,"storage":4},"input_ids":[1]}}\n\n'
)
NOTHING: set[str] = set()

pieces = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def relay(
    stream: bytes,
    sizes: list[int],
    added: set[str] = NOTHING,
    endpoint: Endpoint = CHAT,
) -> tuple[bytes, bytes, Usage | None]:
    """(bytes forwarded before `[DONE]`, `[DONE]` and the bytes after it, the usage) of a stream received in pieces."""
    events, closing, at = EventRelay(endpoint, added), b"", 0
    passed = b""
    while at < len(stream):
        size = sizes.pop(0) if sizes else len(stream)
        now, done = events.feed(stream[at : at + size])
        passed, closing, at = passed + closing + now, done, at + size
    return passed, closing + events.finish(), events.usage


@given(pieces)
def test_stream_is_unchanged_if_the_client_requested_usage(sizes: list[int]) -> None:
    passed, closing, usage = relay(ROLE + TEXT + USAGE + DONE, sizes)
    assert passed + closing == ROLE + TEXT + USAGE + DONE
    assert usage == Usage(9, 4, cached_tokens=7, response_id="c", model="m")


@given(pieces)
def test_sources_of_cached_tokens_that_only_the_gateway_requested_are_removed(sizes: list[int]) -> None:
    passed, closing, usage = relay(ROLE + TEXT + SOURCES + USAGE + DONE, sizes, {USAGE_FIELD, SOURCES_FIELD})
    assert passed + closing == ROLE + TEXT + DONE
    assert usage == Usage(9, 4, cached_tokens=7, fetched_tokens=4, response_id="c", model="m")


@pytest.mark.parametrize(
    ("event", "added", "left"),
    [
        pytest.param(SOURCES, {USAGE_FIELD}, SOURCES, id="requested by the client"),
        pytest.param(SOURCES, {SOURCES_FIELD}, b"", id="with nothing else"),
        pytest.param(
            OTHERS,
            {SOURCES_FIELD},
            b'data: {"choices":[],"sglext":{"input_ids":[1]}}\n\n',
            id="with another extension",
        ),
        pytest.param(
            b'data: {"sglext":{"broken"\n\n',
            {SOURCES_FIELD},
            b'data: {"sglext":{"broken"\n\n',
            id="not JSON",
        ),
    ],
)
def test_only_the_sources_of_cached_tokens_are_removed(event: bytes, added: set[str], left: bytes) -> None:
    passed, closing, _ = relay(ROLE + event + USAGE + DONE, [], added)
    assert passed + closing == ROLE + left + (b"" if USAGE_FIELD in added else USAGE) + DONE


ANSWER = b'{"id":"c","choices":[{"message":{"content":"%s"}}],"usage":{"prompt_tokens":9}%s}'
EXTENSION = b',"sglext":{"cached_tokens_details":{"device":5,"host":0,"storage":2,"storage_backend":null}}'


def test_sources_of_cached_tokens_are_removed_from_a_complete_answer_whose_text_mentions_them() -> None:
    text = EXTENSION.replace(b'"', b'\\"')
    assert without_details(ANSWER % (text, EXTENSION), {SOURCES_FIELD}) == ANSWER % (text, b"")
    assert without_details(ANSWER % (text, b""), {SOURCES_FIELD}) == ANSWER % (text, b"")
    usage = CHAT.read_usage(ANSWER % (text, EXTENSION))
    assert usage is not None
    assert usage.fetched_tokens == 2


DRAFTS = b'"spec_tokens_details":{"spec_accept_length":2.5,"spec_verify_ct":2,"spec_correct_drafts_histogram":[0,1]}'
DRAFTS_EVENT = b'data: {"id":"c","choices":[],"usage":null,"sglext":{%s}}\n\n' % DRAFTS


@given(pieces)
def test_accepted_drafts_that_only_the_gateway_requested_are_removed(sizes: list[int]) -> None:
    for added, left in (({DRAFTS_FIELD}, b""), ({SOURCES_FIELD}, DRAFTS_EVENT)):
        passed, closing, usage = relay(ROLE + TEXT + DRAFTS_EVENT + USAGE + DONE, sizes, added)
        assert passed + closing == ROLE + TEXT + left + USAGE + DONE
        assert usage == Usage(9, 4, cached_tokens=7, verifications=2, response_id="c", model="m")


@pytest.mark.parametrize(
    ("extension", "verifications"),
    [
        (DRAFTS, 2),
        (b'"spec_tokens_details":[{"spec_verify_ct":2},{"spec_verify_ct":3}]', 5),
        (b'"spec_tokens_details":[{"spec_verify_ct":2},{}]', None),
        (b'"spec_tokens_details":null', None),
        (EXTENSION.partition(b"{")[2].removesuffix(b"}") + b"," + DRAFTS, 2),
    ],
    ids=["one", "several samples", "one is unknown", "none", "with sources"],
)
def test_accepted_drafts_of_a_complete_answer_are_read_and_removed(
    extension: bytes, verifications: int | None
) -> None:
    answer = ANSWER % (b"text", b',"sglext":{%s}' % extension)
    usage = CHAT.read_usage(answer)
    assert usage is not None
    assert usage.verifications == verifications
    left = without_details(answer, {SOURCES_FIELD, DRAFTS_FIELD})
    assert json.loads(left) == json.loads(ANSWER % (b"text", b""))
    assert without_details(answer, {USAGE_FIELD}) == answer


@pytest.mark.parametrize(
    ("raw", "sources", "sent", "names"),
    [
        ('{"a": 1}', True, '{"return_cached_tokens_details":true,"a": 1}', {SOURCES_FIELD}),
        (
            '{"return_cached_tokens_details": false}',
            True,
            '{"return_cached_tokens_details":true}',
            {SOURCES_FIELD},
        ),
        (
            '{"return_cached_tokens_details": true}',
            True,
            '{"return_cached_tokens_details": true}',
            NOTHING,
        ),
        (
            '{"stream": true}',
            True,
            '{"stream_options":{"include_usage":true},"return_cached_tokens_details":true,"stream": true}',
            {USAGE_FIELD, SOURCES_FIELD},
        ),
    ],
)
def test_usage_and_sources_are_requested_if_the_client_did_not_request_them(
    raw: str, sources: bool, sent: str, names: set[str]
) -> None:
    body = Body.parse(raw.encode())
    added = CHAT.added_fields(body.fields, sources=sources, drafts=False)
    assert (body.with_fields(added).encode(), set(added)) == (sent.encode(), names)


def test_done_inside_generated_text_does_not_close_the_stream() -> None:
    quoted = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"data: [DONE]"}}]}\n\n'
    assert relay(quoted + ROLE + DONE, [len(quoted)])[:2] == (quoted + ROLE, DONE)
    events = EventRelay(CHAT, NOTHING)
    assert events.feed(quoted) == (quoted, b"")


line_ends = st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=12, max_size=12)


@given(line_ends, pieces)
def test_lines_end_with_cr_lf_or_crlf(ends: list[bytes], sizes: list[int]) -> None:
    """As the specification of server-sent events says, also in one stream, and wherever reads end."""

    def with_ends(events: list[bytes], ends: list[bytes]) -> bytes:
        return b"".join(event + ends[2 * n] + ends[2 * n + 1] for n, event in enumerate(events))

    # A CR and an LF in two events' ends would be one line end.
    ends = [b"\r\n" if end == b"\r" else end for end in ends] if b"\n" in ends else ends
    texts = [each.removesuffix(b"\n\n") for each in (ROLE, TEXT, USAGE, DONE)]
    stream = with_ends(texts, ends)
    passed, closing, usage = relay(stream, sizes)
    assert passed + closing == stream
    assert usage is not None


@pytest.mark.parametrize(
    ("data", "forwarded"),
    [
        (b"data: a\r\n\r\ndata: b\n\ndata: c", b"data: a\r\n\r\ndata: b\n\n"),
        (b"data: a\r\rdata: b", b"data: a\r\r"),
        (b": ping\n", b": ping\n"),
        (b"data: a\n\n: ping\r\ndata: b", b"data: a\n\n: ping\r\n"),
        (b": pi", b""),
    ],
)
def test_complete_lines_are_forwarded_at_once(data: bytes, forwarded: bytes) -> None:
    events = EventRelay(CHAT, NOTHING)
    assert events.feed(data) == (forwarded, b"")
    assert events.finish() == data.removeprefix(forwarded)


@pytest.mark.parametrize("done", [b"data:[DONE]\n\n", b"data:[DONE]\r\n\r\n", b"data: [DONE]\r\r"])
def test_end_of_a_stream_is_recognised_in_each_form(done: bytes) -> None:
    assert relay(b"\xef\xbb\xbf" + ROLE + done, [])[:2] == (b"\xef\xbb\xbf" + ROLE, done)


def test_oversized_event_is_not_buffered() -> None:
    events = EventRelay(CHAT, {USAGE_FIELD})
    passed, _ = events.feed(b"data: " + b"x" * 2_000_000)
    assert len(passed) > 2_000_000


def test_generate_stream_reports_usage_in_every_event() -> None:
    first = b'data: {"text":"a","meta_info":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
    last = (
        b'data: {"text":"ab","meta_info":{"id":"r","prompt_tokens":3,"completion_tokens":2,"cached_tokens":1,'
        b'"cached_tokens_details":{"device":0,"host":0,"storage":1},"spec_verify_ct":1,"finish_reason":{"type":"stop"}}}\n\n'
    )
    passed, closing, usage = relay(first + last + DONE, [], endpoint=GENERATE)
    assert passed + closing == first + last + DONE
    assert usage == Usage(
        3, 2, cached_tokens=1, fetched_tokens=1, verifications=1, finish_reason="stop", response_id="r"
    )


SAMPLE = b'{"text":"a","meta_info":{"prompt_tokens":3,"completion_tokens":%d%s},"index":%d}'


def test_generate_stream_of_several_answers_reports_the_last_usage_of_each() -> None:
    parts = [SAMPLE % (1, b"", 0), SAMPLE % (1, b"", 1), SAMPLE % (5, b"", 1), SAMPLE % (7, b"", 0)]
    stream = b"".join(b"data: " + part + b"\n\n" for part in parts)
    passed, closing, usage = relay(stream + DONE, [], endpoint=GENERATE)
    assert passed + closing == stream + DONE
    assert usage == Usage(6, 12, several=True)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param([SAMPLE % (5, b"", 0)], Usage(3, 5), id="one answer"),
        pytest.param(
            [SAMPLE % (5, b',"cached_tokens":2', 0), SAMPLE % (7, b',"cached_tokens":0', 1)],
            Usage(6, 12, cached_tokens=2, several=True),
            id="several answers",
        ),
        pytest.param(
            [SAMPLE % (5, b',"cached_tokens":2', 0), SAMPLE % (7, b"", 1)],
            Usage(6, 12, several=True),
            id="cached tokens of one are unknown",
        ),
        pytest.param([SAMPLE % (5, b"", 0), b"{}"], None, id="one without usage"),
        pytest.param([], None, id="no answer"),
    ],
)
def test_usage_of_a_list_of_answers_is_their_sum(answers: list[bytes], expected: Usage | None) -> None:
    assert GENERATE.read_usage(b"[" + b",".join(answers) + b"]") == expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        pytest.param(b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}', Usage(1, 2), id="plain"),
        pytest.param(
            b'{"usage":{"prompt_tokens":1,"completion_tokens":2,"prompt_tokens_details":null}}',
            Usage(1, 2),
            id="0.5.8",
        ),
        pytest.param(b'{"usage":null}', None, id="null"),
        pytest.param(b"<html>", None, id="not JSON"),
        pytest.param(b'{"usage":{"prompt_tokens":"n/a"}}', None, id="a text instead of a count"),
        pytest.param(b'{"usage":{"prompt_tokens":-1}}', None, id="a negative count"),
        pytest.param(b'{"usage":{"prompt_tokens":18446744073709551615}}', None, id="a count of 64 bits"),
    ],
)
def test_usage_is_read_from_a_complete_answer(document: bytes, expected: Usage | None) -> None:
    assert CHAT.read_usage(document) == expected


def test_stream_with_usage_removed_equals_a_recorded_stream_without_usage() -> None:
    """The same request was recorded from SGLang 0.5.23 with and without include_usage; ids and times differ."""
    recorded = json.loads((Path(__file__).parent / "fixtures" / "streams_sglang_0_5_23.json").read_text())
    bodies = {
        case["name"]: re.sub(r'"(id|created)":("\w+"|\d+)', r'"\1":0', case["body"]) for case in recorded
    }
    passed, closing, usage = relay(bodies["include_usage"].encode(), [100] * 100, {USAGE_FIELD})
    assert (passed + closing).decode() == bodies["plain"]
    assert usage is not None
    assert usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("endpoint", "name", "event", "finish_reason"),
    [
        (MESSAGES, "messages", "message_stop", "max_tokens"),
        (RESPONSES, "responses", "response.incomplete", "incomplete"),
    ],
    ids=["messages", "responses"],
)
@given(sizes=pieces)
def test_recorded_stream_is_unchanged_and_closed_by_its_last_event(
    endpoint: Endpoint, name: str, event: str, finish_reason: str, sizes: list[int]
) -> None:
    """Recorded from SGLang 0.5.23. /v1/messages reports the tokens of prompt and completion in different events."""
    recorded = json.loads((Path(__file__).parent / "fixtures" / "streams_sglang_0_5_23.json").read_text())
    (body,) = (case["body"].encode() for case in recorded if case["name"] == f"{name}: stream")
    passed, closing, usage = relay(body, [*sizes], endpoint=endpoint)
    assert passed + closing == body
    assert closing.startswith(f"event: {event}\ndata: ".encode())
    assert closing.count(b"event: ") == 1
    began = json.loads(body.split(b"data: ")[1].splitlines()[0])
    assert usage == Usage(
        prompt_tokens=31,
        completion_tokens=8,
        cached_tokens=30,
        finish_reason=finish_reason,
        response_id=began["message" if name == "messages" else "response"]["id"],
        model="Qwen/Qwen2.5-7B-Instruct",
    )


@pytest.mark.parametrize(
    ("usage", "prompt_tokens", "cached_tokens"),
    [
        ({"input_tokens": 5, "output_tokens": 2}, 5, None),
        ({"input_tokens": 5, "cache_read_input_tokens": 7, "output_tokens": 2}, 12, 7),
        ({"input_tokens": 5, "cache_creation_input_tokens": 3, "output_tokens": 2}, 8, None),
    ],
    ids=["nothing cached", "cached", "written to the cache"],
)
def test_anthropic_usage_counts_cached_tokens_separately(
    usage: dict[str, int], prompt_tokens: int, cached_tokens: int | None
) -> None:
    document = {"type": "message", "id": "msg", "stop_reason": "end_turn", "usage": usage}
    assert MESSAGES.usage_of(document) == Usage(
        prompt_tokens, 2, cached_tokens, finish_reason="end_turn", response_id="msg"
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"status": "queued", "usage": None}, Usage(0, 0, finish_reason="queued", response_id="resp")),
        (
            {"status": "completed", "usage": {"input_tokens": 5, "output_tokens": 2}},
            Usage(5, 2, finish_reason="completed", response_id="resp"),
        ),
        (
            {"usage": {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 0}}},
            Usage(5, 2, response_id="resp"),
        ),
    ],
    ids=["in the background", "completed", "no cache report"],
)
def test_usage_of_a_response(fields: dict[str, object], expected: Usage) -> None:
    response = {"object": "response", "id": "resp", **fields}
    assert RESPONSES.usage_of(response) == expected
    assert RESPONSES.usage_of({"type": "response.completed", "response": response}) == expected


def test_error_in_a_stream_of_responses_is_an_event_of_that_api() -> None:
    event = RESPONSES.error_event(RESPONSES.error(502, "server_error", "upstream_broken", "gone"))
    name, data = event.decode().removesuffix("\n\n").split("\n")
    fields = {"code": "upstream_broken", "message": "gone", "param": None}
    assert (name, json.loads(data.removeprefix("data: "))) == (
        "event: error",
        {"type": "error", **fields, "error": {"type": "server_error", **fields}},
    )


NAMED = (
    b'data: {"type":"response.completed","text":"event: response.completed, then event: response.failed"}\n\n'
)


@given(pieces)
def test_closing_event_is_held_back_even_if_its_text_names_one(sizes: list[int]) -> None:
    """The last event of /v1/responses repeats the whole answer, which may be about such events."""
    opened, closing = b"event: response.created\ndata: {}\n\n", b"event: response.completed\n" + NAMED
    assert relay(opened + closing, sizes, endpoint=RESPONSES)[:2] == (opened, closing)
