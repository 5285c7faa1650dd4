"""Reading usage from answers, and relaying events byte for byte."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_gateway.api.sse import EventRelay
from dps_gateway.engine.anthropic import ANTHROPIC_ANSWERS
from dps_gateway.engine.dialect import AnswerFormat, RequestedByGateway, Usage, read_usage
from dps_gateway.engine.openai import OPENAI_ANSWERS, RESPONSES_ANSWERS, RESPONSES_ERRORS
from dps_gateway.engine.sglang import GENERATE_ANSWERS
from dps_gateway.engine.sources import without_sources

ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant"}}],"usage":null}\n\n'
TEXT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"\\"usage\\":{ is just text"}}]}\n\n'
USAGE = (
    b'data: {"id":"c","model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,'
    b'"prompt_tokens_details":{"cached_tokens":7}}}\n\n'
)
RUNNING = b'data: {"id":"c","choices":[{"index":0,"delta":{}}],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"
SOURCES = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":1,"choices":[],"model":"m","usage":null,'
    b'"sglext":{"cached_tokens_details":{"device":2,"host":1,"storage":4,"storage_backend":"SharedPrefixCache"}}}\n\n'
)
OTHERS = (
    b'data: {"choices":[],"sglext":{"cached_tokens_details":{"device":2,"storage":4},"input_ids":[1]}}\n\n'
)
NOTHING = RequestedByGateway()

pieces = st.lists(st.integers(1, 60), min_size=1, max_size=80)


def relay(
    stream: bytes,
    sizes: list[int],
    asked: RequestedByGateway = NOTHING,
    answers: AnswerFormat = OPENAI_ANSWERS,
) -> tuple[bytes, bytes, Usage | None]:
    """(bytes forwarded before `[DONE]`, `[DONE]` and the bytes after it, the usage) of a stream received in pieces."""
    events, closing, at = EventRelay(answers, asked), b"", 0
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
def test_usage_that_only_the_gateway_requested_is_removed(sizes: list[int]) -> None:
    passed, closing, usage = relay(ROLE + TEXT + USAGE + DONE, sizes, RequestedByGateway(usage=True))
    assert passed + closing == ROLE + TEXT + DONE
    assert usage is not None
    assert (usage.prompt_tokens, usage.cached_tokens) == (9, 7)


@given(pieces)
def test_sources_of_cached_tokens_that_only_the_gateway_requested_are_removed(sizes: list[int]) -> None:
    passed, closing, usage = relay(
        ROLE + TEXT + SOURCES + USAGE + DONE, sizes, RequestedByGateway(usage=True, sources=True)
    )
    assert passed + closing == ROLE + TEXT + DONE
    assert usage == Usage(9, 4, cached_tokens=7, fetched_tokens=4, response_id="c", model="m")


@pytest.mark.parametrize(
    ("event", "asked", "left"),
    [
        pytest.param(SOURCES, RequestedByGateway(usage=True), SOURCES, id="requested by the client"),
        pytest.param(SOURCES, RequestedByGateway(sources=True), b"", id="with nothing else"),
        pytest.param(
            OTHERS,
            RequestedByGateway(sources=True),
            b'data: {"choices":[],"sglext":{"input_ids":[1]}}\n\n',
            id="with another extension",
        ),
        pytest.param(
            b'data: {"sglext":{"broken"\n\n',
            RequestedByGateway(sources=True),
            b'data: {"sglext":{"broken"\n\n',
            id="not JSON",
        ),
    ],
)
def test_only_the_sources_of_cached_tokens_are_removed(
    event: bytes, asked: RequestedByGateway, left: bytes
) -> None:
    passed, closing, _ = relay(ROLE + event + USAGE + DONE, [], asked)
    assert passed + closing == ROLE + left + (b"" if asked.usage else USAGE) + DONE


ANSWER = b'{"id":"c","choices":[{"message":{"content":"%s"}}],"usage":{"prompt_tokens":9}%s}'
EXTENSION = b',"sglext":{"cached_tokens_details":{"device":5,"host":0,"storage":2,"storage_backend":null}}'


def test_sources_of_cached_tokens_are_removed_from_a_complete_answer_whose_text_mentions_them() -> None:
    text = EXTENSION.replace(b'"', b'\\"')
    assert without_sources(ANSWER % (text, EXTENSION)) == ANSWER % (text, b"")
    assert without_sources(ANSWER % (text, b"")) == ANSWER % (text, b"")
    usage = read_usage(ANSWER % (text, EXTENSION), OPENAI_ANSWERS)
    assert usage is not None
    assert usage.fetched_tokens == 2


@pytest.mark.parametrize(
    ("raw", "sources", "sent", "asked"),
    [
        ('{"a": 1}', False, '{"a": 1}', RequestedByGateway()),
        ('{"a": 1}', True, '{"return_cached_tokens_details":true,"a": 1}', RequestedByGateway(sources=True)),
        ("{}", True, "{}", RequestedByGateway()),
        (
            '{"return_cached_tokens_details": false}',
            True,
            '{"return_cached_tokens_details":true}',
            RequestedByGateway(sources=True),
        ),
        (
            '{"return_cached_tokens_details": true}',
            True,
            '{"return_cached_tokens_details": true}',
            RequestedByGateway(),
        ),
        (
            '{"stream": true}',
            True,
            '{"stream_options":{"include_usage":true},"return_cached_tokens_details":true,"stream": true}',
            RequestedByGateway(usage=True, sources=True),
        ),
    ],
)
def test_usage_and_sources_are_requested_if_the_client_did_not_request_them(
    raw: str, sources: bool, sent: str, asked: RequestedByGateway
) -> None:
    result = OPENAI_ANSWERS.request_usage(json.loads(raw), raw.encode(), sources=sources)
    assert result == (sent.encode(), asked)


def test_done_event_is_returned_separately_from_the_events_before_it() -> None:
    assert relay(ROLE + DONE, [])[:2] == (ROLE, DONE)


def test_done_inside_generated_text_does_not_close_the_stream() -> None:
    quoted = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"data: [DONE]"}}]}\n\n'
    assert relay(quoted + ROLE + DONE, [len(quoted)])[:2] == (quoted + ROLE, DONE)
    events = EventRelay(OPENAI_ANSWERS, RequestedByGateway())
    assert events.feed(quoted) == (quoted, b"")


def test_usage_in_an_event_with_choices_is_kept() -> None:
    passed, closing, usage = relay(RUNNING + DONE, [], RequestedByGateway(usage=True))
    assert passed + closing == RUNNING + DONE
    assert usage is not None


def test_crlf_line_endings_are_supported() -> None:
    stream = (ROLE + USAGE + DONE).replace(b"\n", b"\r\n")
    passed, closing, usage = relay(stream, [], RequestedByGateway(usage=True))
    assert passed + closing == (ROLE + DONE).replace(b"\n", b"\r\n")
    assert usage is not None


def test_incomplete_last_event_is_forwarded() -> None:
    passed, closing, _ = relay(ROLE + b'data: {"id"', [], RequestedByGateway(usage=True))
    assert passed + closing == ROLE + b'data: {"id"'


def test_oversized_event_is_not_buffered() -> None:
    events = EventRelay(OPENAI_ANSWERS, RequestedByGateway(usage=True))
    passed, _ = events.feed(b"data: " + b"x" * 2_000_000)
    assert len(passed) > 2_000_000


def test_generate_stream_reports_usage_in_every_event() -> None:
    first = b'data: {"text":"a","meta_info":{"prompt_tokens":3,"completion_tokens":1}}\n\n'
    last = (
        b'data: {"text":"ab","meta_info":{"id":"r","prompt_tokens":3,"completion_tokens":2,"cached_tokens":1,'
        b'"cached_tokens_details":{"device":0,"host":0,"storage":1},"finish_reason":{"type":"stop"}}}\n\n'
    )
    passed, closing, usage = relay(first + last + DONE, [], answers=GENERATE_ANSWERS)
    assert passed + closing == first + last + DONE
    assert usage == Usage(3, 2, cached_tokens=1, fetched_tokens=1, finish_reason="stop", response_id="r")


SAMPLE = b'{"text":"a","meta_info":{"prompt_tokens":3,"completion_tokens":%d%s},"index":%d}'


def test_generate_stream_of_several_answers_reports_the_last_usage_of_each() -> None:
    parts = [SAMPLE % (1, b"", 0), SAMPLE % (1, b"", 1), SAMPLE % (5, b"", 1), SAMPLE % (7, b"", 0)]
    stream = b"".join(b"data: " + part + b"\n\n" for part in parts)
    passed, closing, usage = relay(stream + DONE, [], answers=GENERATE_ANSWERS)
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
    assert read_usage(b"[" + b",".join(answers) + b"]", GENERATE_ANSWERS) == expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        pytest.param(b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}', Usage(1, 2), id="plain"),
        pytest.param(
            b'{"usage":{"prompt_tokens":1,"completion_tokens":2,"prompt_tokens_details":null}}',
            Usage(1, 2),
            id="0.5.8",
        ),
        pytest.param(b'{"choices":[]}', None, id="none"),
        pytest.param(b'{"usage":null}', None, id="null"),
        pytest.param(b"[1]", None, id="a list"),
        pytest.param(b"<html>", None, id="not JSON"),
        pytest.param(b'{"usage":{"prompt_tokens":"n/a"}}', None, id="a text instead of a count"),
        pytest.param(b'{"usage":{"prompt_tokens":-1}}', None, id="a negative count"),
        pytest.param(b'{"usage":{"prompt_tokens":true}}', None, id="a truth value instead of a count"),
        pytest.param(b'{"usage":{"prompt_tokens":18446744073709551615}}', None, id="a count of 64 bits"),
    ],
)
def test_usage_is_read_from_a_complete_answer(document: bytes, expected: Usage | None) -> None:
    assert read_usage(document, OPENAI_ANSWERS) == expected


def test_stream_with_usage_removed_equals_a_recorded_stream_without_usage() -> None:
    """The same request was recorded from SGLang 0.5.23 with and without include_usage; ids and times differ."""
    recorded = json.loads((Path(__file__).parent / "fixtures" / "streams_sglang_0_5_23.json").read_text())
    bodies = {
        case["name"]: re.sub(r'"(id|created)":("\w+"|\d+)', r'"\1":0', case["body"]) for case in recorded
    }
    passed, closing, usage = relay(
        bodies["include_usage"].encode(), [100] * 100, RequestedByGateway(usage=True)
    )
    assert (passed + closing).decode() == bodies["plain"]
    assert usage is not None
    assert usage.completion_tokens == 8


@given(pieces)
def test_recorded_messages_stream_is_unchanged_and_its_usage_is_complete(sizes: list[int]) -> None:
    """Recorded from SGLang 0.5.23: the prompt's tokens are in the first event, the completion's in the last but one."""
    recorded = json.loads((Path(__file__).parent / "fixtures" / "streams_sglang_0_5_23.json").read_text())
    (body,) = (case["body"].encode() for case in recorded if case["name"] == "messages: stream")
    passed, closing, usage = relay(body, sizes, answers=ANTHROPIC_ANSWERS)
    assert passed + closing == body
    assert closing == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert usage == Usage(
        prompt_tokens=31,
        completion_tokens=8,
        cached_tokens=30,
        finish_reason="max_tokens",
        response_id=json.loads(body.split(b"data: ")[1].splitlines()[0])["message"]["id"],
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
    assert ANTHROPIC_ANSWERS.usage_of(document) == Usage(
        prompt_tokens, 2, cached_tokens, finish_reason="end_turn", response_id="msg"
    )


@pytest.mark.parametrize("document", [None, [], {}, {"usage": None}, {"message": None}, {"type": "ping"}])
def test_documents_without_anthropic_usage_report_none(document: object) -> None:
    assert ANTHROPIC_ANSWERS.usage_of(document) is None


@given(pieces)
def test_recorded_responses_stream_is_unchanged_and_closed_by_its_last_event(sizes: list[int]) -> None:
    """Recorded from SGLang 0.5.23: the last event contains the whole response."""
    recorded = json.loads((Path(__file__).parent / "fixtures" / "streams_sglang_0_5_23.json").read_text())
    (body,) = (case["body"].encode() for case in recorded if case["name"] == "responses: stream")
    passed, closing, usage = relay(body, sizes, answers=RESPONSES_ANSWERS)
    assert passed + closing == body
    assert closing.startswith(b"event: response.incomplete\ndata: ")
    assert closing.count(b"event: ") == 1
    assert usage == Usage(
        prompt_tokens=31,
        completion_tokens=8,
        cached_tokens=30,
        finish_reason="incomplete",
        response_id=json.loads(body.split(b"data: ")[1].splitlines()[0])["response"]["id"],
        model="Qwen/Qwen2.5-7B-Instruct",
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
    assert RESPONSES_ANSWERS.usage_of(response) == expected
    assert RESPONSES_ANSWERS.usage_of({"type": "response.completed", "response": response}) == expected


@pytest.mark.parametrize("document", [None, [], {}, {"response": None}, {"type": "error", "message": "x"}])
def test_documents_that_are_no_response_report_no_usage(document: object) -> None:
    assert RESPONSES_ANSWERS.usage_of(document) is None


def test_error_in_a_stream_of_responses_is_an_event_of_that_api() -> None:
    event = RESPONSES_ERRORS.event(RESPONSES_ERRORS.error(502, "server_error", "upstream_broken", "gone"))
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
    assert relay(opened + closing, sizes, answers=RESPONSES_ANSWERS)[:2] == (opened, closing)
