"""The benchmark's HTTP framing, with messages split at arbitrary positions."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps_lab.bench.wire import Request, RequestReader, ResponseReader, WireError, chunk, dechunk

REQUESTS = (
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\n\r\n\r\n\r\n{} "
    b"POST /tokenize HTTP/1.1\r\ncontent-length:2\r\naccept: */*\r\n\r\n{}"
)
CUT = [
    Request("GET", "/health", b""),
    Request("POST", "/v1/chat/completions", b"\r\n\r\n{} "),
    Request("POST", "/tokenize", b"{}"),
]
STREAM = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
    + chunk(b"data: 0\n\n")
    + chunk(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)
UNARY = b'HTTP/1.1 200 OK\r\nCONTENT-LENGTH: 8\r\n\r\n{"a": 1}'


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if start < end]


CUTS = st.lists(st.integers(min_value=0, max_value=10_000), max_size=12)


@given(CUTS)
def test_requests_are_parsed_regardless_of_how_they_are_split(cuts: list[int]) -> None:
    reader = RequestReader()
    assert [request for piece in pieces(REQUESTS, cuts) for request in reader.feed(piece)] == CUT


@given(CUTS)
@pytest.mark.parametrize(
    ("response", "body"), [(STREAM, b"data: 0\n\ndata: [DONE]\n\n"), (UNARY, b'{"a": 1}')]
)
def test_response_is_complete_exactly_at_its_last_byte(response: bytes, body: bytes, cuts: list[int]) -> None:
    reader = ResponseReader()
    *before, last = pieces(response, cuts)
    for _ in range(2):  # the connection is reused
        assert [reader.feed(piece) for piece in before] == [None] * len(before)
        assert reader.feed(last) == body


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", "the status is not 200"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "unknown length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{}", "longer than its Content-Length"),
    ],
)
def test_unexpected_response_is_an_error(response: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        ResponseReader().feed(response)


def test_chunked_request_is_an_error() -> None:
    with pytest.raises(WireError, match="chunked"):
        RequestReader().feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8))
def test_dechunking_reverses_chunking(parts: list[bytes]) -> None:
    assert dechunk(b"".join(map(chunk, parts)) + b"0\r\n\r\n") == b"".join(parts)


@pytest.mark.parametrize("broken", [b"", b"3\r\nab", b"3\r\nabcd\r\n0\r\n\r\n", b"1\r\na\r\n"])
def test_malformed_chunks_are_an_error(broken: bytes) -> None:
    with pytest.raises(WireError):
        dechunk(broken)
