"""The gateway's decision log as a workload of a simulation."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest

from dps_lab.simulate.decision_log import is_decision_log, parse_decision_log
from dps_lab.simulate.gateway_logs import read_decision_logs
from dps_lab.simulate.trace import SessionTrace, TraceError, TurnLengths
from dps_lab.simulate.workloads import load_workload


def entry(session: str, turn: int, time: float, prompt: int, **other: object) -> dict[str, Any]:
    """One line of a decision log, with the fields that docs/gateway.md lists."""
    return {
        "time": time,
        "session": session,
        "turn": turn,
        "history": "appended",
        "prompt_tokens": prompt,
        "delta_tokens": prompt,
        "uncached_tokens": {"speculative": prompt, "greedy": prompt},
        "pool": "greedy",
        "reason": "over_threshold",
        "first_token_seconds": None,
        "total_seconds": 2.0,
        "output_tokens": 20,
        "cached_tokens": None,
        **other,
    }


def lines(*entries: dict[str, Any]) -> list[str]:
    return [json.dumps(each) for each in entries]


def test_turns_are_grouped_into_sessions_with_arrival_and_think_times() -> None:
    log = lines(
        entry("b", 1, 1003.0, 500),
        entry("a", 1, 1001.0, 100),
        entry("a", 2, 1004.5, 200, output_tokens=0, unknown="a later version's field"),
    )
    assert parse_decision_log(log, "d.jsonl") == [
        SessionTrace(
            id="a",
            arrival_seconds=0.0,
            turns=[
                TurnLengths(prompt_tokens=100, output_tokens=20),
                TurnLengths(prompt_tokens=200, output_tokens=1, think_seconds=1.5),
            ],
        ),
        SessionTrace(id="b", arrival_seconds=2.0, turns=[TurnLengths(prompt_tokens=500, output_tokens=20)]),
    ]


def test_turns_that_overlap_have_no_think_time() -> None:
    (session,) = parse_decision_log(lines(entry("a", 1, 1.0, 100), entry("a", 2, 2.0, 200)), "d.jsonl")
    assert session.turns[1].think_seconds == 0


def test_a_session_without_its_first_turn_is_left_out() -> None:
    log = lines(entry("old", 7, 1.0, 900), entry("new", 1, 2.0, 100))
    assert [session.id for session in parse_decision_log(log, "d.jsonl")] == ["new"]


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (lines(entry("old", 7, 1.0, 900)), "d.jsonl: the decision log has the first turn of no session"),
        (["", '{"session": "a"}'], "d.jsonl, line 2: time: the field is missing"),
        (
            lines(entry("a", 1, 1.0, 0)),
            "d.jsonl, line 1: prompt_tokens: Input should be greater than 0, got 0",
        ),
    ],
)
def test_an_unusable_log_is_an_error(log: list[str], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_decision_log(log, "d.jsonl")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (json.dumps(entry("a", 1, 1.0, 5)), True),
        ('{"id": "a", "turns": []}', False),
        ("[1]", False),
        ("{", False),
        ("", False),
    ],
)
def test_a_decision_log_is_recognised_by_its_fields(line: str, expected: bool) -> None:
    assert is_decision_log(line) is expected


def test_a_file_that_is_a_decision_log_can_be_named_as_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text("\n" + "\n".join(lines(entry("a", 1, 1.0, 100))))
    assert [session.id for session in load_workload(str(path))] == ["a"]


class FakeAdminPort(BaseHTTPRequestHandler):
    """Answers /decisions with the server's log; a server without a log answers 404, as a gateway does."""

    def do_GET(self) -> None:
        log: str | None = cast(LogServer, self.server).log
        cast(LogServer, self.server).authorization = self.headers["Authorization"]
        self.send_response(404 if log is None else 200)
        self.end_headers()
        self.wfile.write((log or '{"error": "set routing.decisionLog"}').encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class InterruptedAdminPort(FakeAdminPort):
    """Sends the server's log as the beginning of a chunked body, and ends the connection, as a restart does."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write((cast(LogServer, self.server).log or "").encode())


class LogServer(ThreadingHTTPServer):
    log: str | None
    authorization: str | None


@contextmanager
def serving(
    host: str, port: int, log: str | None, handler: type[FakeAdminPort] = FakeAdminPort
) -> Iterator[LogServer]:
    server = LogServer((host, port), handler)
    server.log = log
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def replica(host: str, port: int, log: str | None) -> Iterator[int]:
    with serving(host, port, log) as server:
        yield server.server_port


@pytest.mark.parametrize(
    ("environment", "sent"), [({"DPS_ADMIN_TOKEN": "secret"}, "Bearer secret"), ({}, None)]
)
def test_the_token_of_the_admin_port_is_sent(environment: dict[str, str], sent: str | None) -> None:
    with serving("127.0.0.1", 0, "{}") as server:
        url = f"http://127.0.0.1:{server.server_port}/decisions"
        assert list(read_decision_logs(url, environment)) == ["{}"]
    assert server.authorization == sent


def test_logs_of_all_replicas_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    first = "\n".join(lines(entry("a", 1, 1.0, 100)))
    second = "\n".join(lines(entry("a", 2, 4.0, 200), entry("b", 1, 2.0, 300)))
    with replica("127.0.0.1", 0, first) as port, replica("127.0.0.2", port, second):
        addresses = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{host}", port)) for host in (1, 2)
        ]
        resolve = socket.getaddrinfo

        def with_two_addresses(host: str, *arguments: Any, **options: Any) -> Any:
            return addresses if host == "metrics" else resolve(host, *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", with_two_addresses)
        sessions = load_workload(f"http://metrics:{port}/decisions")
    assert [(session.id, [turn.prompt_tokens for turn in session.turns]) for session in sessions] == [
        ("a", [100, 200]),
        ("b", [300]),
    ]


def test_a_replica_without_a_log_is_an_error() -> None:
    with (
        replica("127.0.0.1", 0, None) as port,
        pytest.raises(TraceError, match=r"status 404: .*set routing\.decisionLog"),
    ):
        load_workload(f"http://127.0.0.1:{port}/decisions")


@pytest.mark.parametrize("cut", ["between chunks", "in a chunk"])
def test_a_log_that_is_interrupted_is_an_error(cut: str) -> None:
    """The received part is a valid log, but does not contain the newest turns."""
    (line,) = lines(entry("a", 1, 1.0, 100))
    size = len(line) + 1 if cut == "between chunks" else 9999
    body = f"{size:x}\r\n{line}\n" + ("\r\n" if cut == "between chunks" else "")
    with (
        serving("127.0.0.1", 0, body, InterruptedAdminPort) as server,
        pytest.raises(
            TraceError, match="ended the connection before the end of its log; run the command again"
        ),
    ):
        load_workload(f"http://127.0.0.1:{server.server_port}/decisions")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1/decisions", "does not answer"),
        ("http://127.0.0.1:port/decisions", "cannot be resolved"),
        ("http:///decisions", "has no host"),
    ],
)
def test_urls_without_a_gateway_are_errors(url: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_workload(url)
