"""The benchmark's fake engine and load generator, tested against each other."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest

from dps_lab.bench.fake_engine import FakeEngine, arrived_at, completion, events, is_whole
from dps_lab.bench.load import run_load
from dps_lab.bench.traffic import Content, TrafficPattern, traffic
from dps_lab.bench.wire import WireError


@pytest.fixture
async def engine() -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(FakeEngine, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def requests(stream: bool, number: int, path: str = "/v1/chat/completions") -> Iterator[bytes]:
    body = json.dumps({"stream": stream, "seed": 42}).encode()
    return iter(
        [b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)] * number
    )


async def test_request_sets_the_number_of_chunks_and_the_first_byte_precedes_the_last(engine: int) -> None:
    pattern = TrafficPattern(True, Content(1024, "distinct"), chunks=512)
    made = traffic(pattern, "a", sessions=3, connections=2, count=count_words)
    load = await run_load(engine, made.sequences(), partial(is_whole, stream=True, chunks=512))
    assert len(load.finished) == 3
    assert all(0 < first < whole for first, whole in zip(load.first_byte, load.latencies, strict=True))


@pytest.mark.parametrize("stream", [False, True])
async def test_every_request_of_every_connection_is_answered_completely(engine: int, stream: bool) -> None:
    sequences = [requests(stream, 5), requests(stream, 5), requests(stream, 5)]
    load = await run_load(engine, sequences, partial(is_whole, stream=stream), keep=True)
    assert len(load.bodies) == len(load.sent) == len(load.finished) == 15
    assert 0 < load.counted <= 15
    assert all(
        sent < arrived_at(body) < finished
        for sent, body, finished in zip(load.sent, load.bodies, load.finished, strict=True)
    )


async def test_request_sequence_shared_by_two_connections_is_sent_once(engine: int) -> None:
    shared = requests(False, 7)
    load = await run_load(engine, [shared, shared], partial(is_whole, stream=False))
    assert len(load.sent) == 7


@pytest.mark.parametrize(
    ("sequence", "whole"),
    [
        pytest.param(requests(False, 1), partial(is_whole, stream=True), id="incomplete answer"),
        pytest.param(requests(False, 1, "/v1/nothing"), partial(is_whole, stream=False), id="status 404"),
    ],
)
async def test_wrong_answer_fails_the_run(
    engine: int, sequence: Iterator[bytes], whole: partial[bool]
) -> None:
    with pytest.raises(WireError):
        await run_load(engine, [sequence], whole)


def test_non_streaming_answer_is_a_chat_completion() -> None:
    answer = json.loads(completion(b'{"seed": 1200}', arrived=17))
    assert answer == {
        "id": "fake-00000000000000000017",
        "object": "chat.completion",
        "created": 1_760_000_000,
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "word " * 32},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 1200, "completion_tokens": 32, "total_tokens": 1232},
    }


@pytest.mark.parametrize(
    ("request_body", "usage"),
    [
        (b'{"stream": true, "seed": 7}', []),
        (
            b'{"stream":true,"seed":7,"stream_options":{"include_usage":true}}',
            [{"prompt_tokens": 7, "completion_tokens": 32, "total_tokens": 39}],
        ),
    ],
)
def test_stream_has_32_chunks_and_usage_only_on_request(
    request_body: bytes, usage: list[dict[str, int]]
) -> None:
    *chunks, done = events(request_body, arrived=17)
    assert done == b"data: [DONE]\n\n"
    parsed = [json.loads(chunk.removeprefix(b"data: ")) for chunk in chunks]
    assert "".join(c["choices"][0]["delta"]["content"] for c in parsed[:32]) == "word " * 32
    assert [c["choices"][0]["finish_reason"] for c in parsed[:32]] == [None] * 31 + ["stop"]
    assert [c["usage"] for c in parsed[32:]] == usage
    assert is_whole(b"".join([*chunks, done]), stream=True) == (not usage)


def count_words(text: str) -> int:
    return len(text.split())


def test_growing_session_appends_to_its_history_on_one_connection() -> None:
    pattern = TrafficPattern(False, Content(4096, "growing"))
    made = traffic(pattern, "a", sessions=6, connections=3, count=count_words)
    assert [(len(warm), len(timed)) for warm, timed in zip(made.warm, made.timed, strict=True)] == [
        (2, 16)
    ] * 3
    for warm, timed in zip(made.warm, made.timed, strict=True):
        history = [json.loads(each.partition(b"\r\n\r\n")[2])["messages"] for each in warm]
        for number, each in enumerate(timed):
            messages = json.loads(each.partition(b"\r\n\r\n")[2])["messages"]
            assert messages[:-2] == history[number % 2]
            assert [message["role"] for message in messages[-3:]] == ["user", "assistant", "user"]
            history[number % 2] = messages


@pytest.mark.parametrize("size", [4096, 32768])
@pytest.mark.parametrize("sessions", ["distinct", "growing"])
def test_request_bodies_have_about_the_stated_size(size: int, sessions: str) -> None:
    content = Content(size, "distinct" if sessions == "distinct" else "growing")
    made = traffic(TrafficPattern(False, content), "a", sessions=2, connections=1, count=count_words)
    lengths = [len(request) for mine in made.timed for request in mine]
    assert 0.85 * size < sum(lengths) / len(lengths) < 1.15 * size


def test_requests_are_determined_by_the_seed_and_differ_between_seeds() -> None:
    pattern = TrafficPattern(True, Content(4096, "distinct"))
    first, again, other = (traffic(pattern, seed, 5, 2, count_words) for seed in ("a", "a", "b"))
    assert first == again
    assert not set(first.timed[0]) & set(other.timed[0])
