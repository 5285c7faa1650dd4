"""The gateway's decision log as a workload of a simulation."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dps_lab.simulate.decision_log import parse_decision_log
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


def test_acceptance_of_sessions_is_that_of_their_verified_drafts() -> None:
    """With 3 draft tokens, 2.35 tokens per verification are those of a probability of about 0.66."""
    log = lines(
        entry("code", 1, 1.0, 100, output_tokens=1600, verifications=500),
        entry("code", 2, 9.0, 2000, output_tokens=1600, verifications=500),
        entry("prose", 1, 2.0, 100, output_tokens=1500, verifications=1000),
        entry("greedy", 1, 3.0, 100, verifications=None),
    )
    found = {session.id: session.acceptance for session in parse_decision_log(log, "d.jsonl")}
    assert found == {
        "code": pytest.approx(0.85, abs=0.01),
        "prose": pytest.approx(0.34, abs=0.01),
        "greedy": pytest.approx(0.66, abs=0.01),
    }
    few = lines(
        entry("few", 1, 1.0, 100, output_tokens=4, verifications=1),
        entry("many", 1, 2.0, 100, output_tokens=1500, verifications=1000),
    )
    assert (parse_decision_log(few, "d.jsonl")[0].acceptance or 0) < 0.6


def test_turns_are_grouped_into_sessions_with_arrival_and_think_times() -> None:
    """A session without its first turn is left out. Turns that overlap have no think time."""
    log = lines(
        entry("old", 7, 1000.0, 900),
        entry("b", 1, 1003.0, 500),
        entry("a", 1, 1001.0, 100),
        entry("b", 2, 1004.0, 600),
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
        SessionTrace(
            id="b",
            arrival_seconds=2.0,
            turns=[TurnLengths(prompt_tokens=length, output_tokens=20) for length in (500, 600)],
        ),
    ]


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


def test_a_file_that_is_a_decision_log_can_be_named_as_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text("\n" + "\n".join(lines(entry("a", 1, 1.0, 100))))
    assert [session.id for session in load_workload(str(path))] == ["a"]


@asynccontextmanager
async def serving(
    log: str | None, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[tuple[int, list[str | None]]]:
    """An admin port with a log; without one it answers 404, as a gateway does. Yields the port and the tokens sent."""
    tokens: list[str | None] = []

    async def decisions(request: web.Request) -> web.Response:
        tokens.append(request.headers.get("Authorization"))
        return web.Response(
            status=404 if log is None else 200, text=log or '{"error": "set routing.decisionLog"}'
        )

    app = web.Application()
    app.router.add_get("/decisions", decisions)
    async with TestServer(app, host=host, port=port or None) as server:
        assert server.port is not None
        yield server.port, tokens


@pytest.mark.parametrize(
    ("environment", "sent"), [({"DPS_ADMIN_TOKEN": "secret"}, "Bearer secret"), ({}, None)]
)
async def test_the_token_of_the_admin_port_is_sent(environment: dict[str, str], sent: str | None) -> None:
    async with serving("{}") as (port, tokens):
        url = f"http://127.0.0.1:{port}/decisions"
        assert await asyncio.to_thread(lambda: list(read_decision_logs(url, environment))) == ["{}"]
    assert tokens == [sent]


async def test_logs_of_all_replicas_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    first = "\n".join(lines(entry("a", 1, 1.0, 100)))
    second = "\n".join(lines(entry("a", 2, 4.0, 200), entry("b", 1, 2.0, 300)))
    async with serving(first) as (port, _), serving(second, "127.0.0.2", port):
        addresses = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{host}", port)) for host in (1, 2)
        ]
        resolve = socket.getaddrinfo

        def with_two_addresses(host: str, *arguments: Any, **options: Any) -> Any:
            return addresses if host == "metrics" else resolve(host, *arguments, **options)

        monkeypatch.setattr(socket, "getaddrinfo", with_two_addresses)
        sessions = await asyncio.to_thread(load_workload, f"http://metrics:{port}/decisions")
    assert [(session.id, [turn.prompt_tokens for turn in session.turns]) for session in sessions] == [
        ("a", [100, 200]),
        ("b", [300]),
    ]


async def test_a_replica_without_a_log_is_an_error() -> None:
    async with serving(None) as (port, _):
        with pytest.raises(TraceError, match=r"status 404: .*set routing\.decisionLog"):
            await asyncio.to_thread(load_workload, f"http://127.0.0.1:{port}/decisions")


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
