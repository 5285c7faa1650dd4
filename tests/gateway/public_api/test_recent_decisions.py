"""What the page on the admin port reads: recent decisions, requests in progress, and who may see them."""

import asyncio
import base64
import json
import pickle
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import BaseTestServer, TestServer

from dps_gateway.api.admin import admin_app
from dps_gateway.telemetry.recent import Recent
from dps_testkit.decision_records import decision_record
from dps_testkit.in_process_gateway import CHUNK, DONE, HeldAnswers, InProcessGateway, ScriptedEngine, chat

PATHS = ("/", "/page/page.js", "/live", "/records?session=s")


@pytest.fixture
async def admin(gateway: InProcessGateway) -> AsyncIterator[BaseTestServer]:
    async with TestServer(admin_app(gateway.runtime)) as server:
        yield server


def test_ring_keeps_the_newest_records() -> None:
    recent = Recent(max_records=3)
    assert recent.after(0, 10) == []
    records = [decision_record(turn=turn) for turn in range(5)]
    for record in records:
        recent.add(record)
    assert recent.after(0, 10) == records[2:]
    assert recent.after(3, 10) == records[3:]
    assert recent.after(0, 1) == records[4:]
    assert recent.after(5, 10) == []


def test_records_are_found_by_each_id() -> None:
    recent = Recent()
    first = decision_record(session="dps-1", client_session="mine", request_id="r1")
    for record in (first, decision_record(session=None, request_id="r2")):
        recent.add(record)
    for value in ("dps-1", "mine", "r1"):
        assert recent.of(value) == [first]
    assert recent.of("dps") == recent.of("") == []


async def test_decision_says_where_a_changed_history_differs_without_its_content(
    gateway: InProcessGateway,
) -> None:
    for system in ("It is Monday.", "It is Tuesday."):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
        await gateway.post(json=chat(messages=messages), headers={"x-session-id": "mine"})
    records = gateway.runtime.recent.of("mine")
    changed = [record.document()["changed"] for record in records]
    assert changed == [None, {"message": 0, "role": "system", "byte": 0}]
    assert b"Tuesday" not in pickle.dumps(records)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str, Any]]:
    """The events of a stream: name, id and data."""
    fields: dict[str, str] = {}
    async for line in response.content:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        else:
            yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
            fields = {}


async def test_stream_has_the_state_and_each_decision_once(
    gateway: InProcessGateway, engine: ScriptedEngine, admin: BaseTestServer
) -> None:
    await gateway.post(json=chat(), headers={"x-session-id": "mine", "x-request-id": "first"})
    async with asyncio.timeout(20), gateway.client.get(admin.make_url("/live")) as response:
        stream = events(response)
        _, _, state = await anext(stream)
        assert state["pools"]["greedy"]["replicas"][0]["state"] == "ready"
        assert (state["decisions"], state["configError"], state["redis"]) == (1, None, "none")
        name, number, (record,) = await anext(stream)
        assert (name, number, record["request_id"]) == ("decisions", "1", "first")
        engine.respond(status=400, text="{}")
        await gateway.post(json=chat(), headers={"x-request-id": "second"})
        while (event := await anext(stream))[0] == "state":
            pass
    assert [each["request_id"] for each in event[2]] == ["second"]
    assert (event[2][0]["outcome"], event[2][0]["status"]) == ("failed", 400)
    assert event[2][0]["output_tokens"] is None
    async with gateway.client.get(admin.make_url("/records?session=mine")) as response:
        assert await response.json() == [record]
    assert (record["outcome"], record["client_session"], record["output_tokens"]) == ("complete", "mine", 2)
    assert "hello" not in json.dumps([record, event])
    headers = {"Last-Event-ID": "1"}
    async with gateway.client.get(admin.make_url("/live"), headers=headers) as response:
        stream = events(response)
        await anext(stream)
        assert [each["request_id"] for each in (await anext(stream))[2]] == ["second"]


async def test_requests_in_progress_have_a_phase(gateway: InProcessGateway, engine: ScriptedEngine) -> None:
    engine.answer = held = HeldAnswers()
    request = asyncio.create_task(gateway.post(json=chat(), headers={"x-request-id": "r"}))
    await held.received.wait()
    (progress,) = (each.progress() for each in gateway.runtime.recent.in_progress)
    assert (progress["request_id"], progress["phase"]) == ("r", "running")
    held.release.set()
    await request
    assert not gateway.runtime.recent.in_progress


async def test_streams_are_decoded_after_their_first_byte(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    engine.stream(CHUNK, DONE)
    async with gateway.client.post(gateway.url + "/v1/chat/completions", json=chat(stream=True)) as response:
        await response.content.readany()
    (record,) = (each.document() for each in gateway.runtime.recent.after(0, 10))
    assert 0 < record["first_token_seconds"] <= record["total_seconds"]


@pytest.mark.parametrize("path", PATHS)
async def test_page_requires_the_token(gateway: InProcessGateway, admin: BaseTestServer, path: str) -> None:
    gateway.runtime.admin_token = "token"
    sent = {"": 401, "Bearer wrong": 401, "Basic !": 401, "Bearer token": 200}
    sent |= {
        f"Basic {base64.b64encode(user).decode()}": status
        for user, status in ((b"a:token", 200), (b"token", 401))
    }
    for authorization, expected in sent.items():
        async with gateway.client.get(
            admin.make_url(path), headers={"Authorization": authorization}
        ) as response:
            assert response.status == expected
            if expected == 401:  # a browser asks for the token
                assert response.headers.getall("WWW-Authenticate") == ['Basic realm="DPS Router"', "Bearer"]


@pytest.mark.parametrize("path", PATHS)
async def test_page_is_not_served_under_the_name_of_another_site(
    gateway: InProcessGateway, admin: BaseTestServer, path: str
) -> None:
    for host, status in {"localhost:9090": 200, "[::1]:9090": 200, "attacker.example": 401}.items():
        async with gateway.client.get(admin.make_url(path), headers={"Host": host}) as response:
            assert response.status == status


@pytest.mark.parametrize("path", ["/live", "/records?session=s"])
async def test_pages_of_other_gateways_on_the_same_host_may_read_this_one(
    gateway: InProcessGateway, admin: BaseTestServer, path: str
) -> None:
    own = f"http://{admin.host}:9091"
    allowed = {own: own, "http://localhost:9091": None, "https://a.example": None, "null": None, "": None}
    for origin, expected in allowed.items():
        async with gateway.client.get(admin.make_url(path), headers={"Origin": origin}) as response:
            found = response.headers.get("Access-Control-Allow-Origin")
            assert (found, response.status) == (expected, 200)


async def test_files_of_the_page_load_nothing_from_elsewhere(
    gateway: InProcessGateway, admin: BaseTestServer
) -> None:
    async with gateway.client.get(admin.make_url("/")) as response:
        assert response.headers["Content-Security-Policy"].startswith(
            "default-src 'none'; script-src 'self';"
        )
        assert f"connect-src 'self' http://{admin.host}:*;" in response.headers["Content-Security-Policy"]
        assert "http" not in await response.text()
    for path in ("/page/admin.py", "/page/__init__.py", "/page/..%2fadmin.py"):
        async with gateway.client.get(admin.make_url(path)) as response:
            assert response.status == 404


async def test_simulation_needs_json_and_the_lab(
    gateway: InProcessGateway, admin: BaseTestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"policy": "AlwaysGreedy", "threshold": "none", "fleet": "speculative=1,greedy=1"}
    url = admin.make_url("/what-if")
    async with gateway.client.post(url, data=json.dumps(options)) as response:
        assert response.status == 415
    async with gateway.client.post(url, json=options) as response:  # there are no decisions yet
        assert (response.status, "no complete turns" in await response.text()) == (422, True)
    for turn in range(2):
        await gateway.post(json=chat(messages=[{"role": "user", "content": "x " * (turn + 1)}]))
    async with gateway.client.post(url, json=options) as response:
        result = await response.json()
    assert (result["turns"], result["then"]["speculative_share"]) == (2, 0)
    monkeypatch.setattr("dps_gateway.api.page.find_spec", lambda name: None)
    async with gateway.client.post(url, json=options) as response:
        assert (response.status, "dps-router[lab]" in await response.text()) == (422, True)
