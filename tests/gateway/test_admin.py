"""The admin port: the token that protects sessions, the decision log, and what is shown of the configuration."""

import socket
from pathlib import Path

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from dps_gateway.api.admin import admin_app, is_local, redacted
from dps_gateway.config import Listen
from dps_gateway.runtime import Runtime
from dps_gateway.telemetry.json_log import JsonLog

PROTECTED = [("GET", "/decisions"), ("GET", "/sessions/s"), ("DELETE", "/sessions/s")]
OPEN = [("GET", path) for path in ("/livez", "/metrics", "/pools", "/config")]


@pytest.mark.parametrize("sent", [{}, {"Authorization": "Bearer other"}, {"Authorization": "Basic token"}])
async def test_sessions_are_protected_by_the_token(runtime: Runtime, sent: dict[str, str]) -> None:
    runtime.admin_token = "token"
    async with TestServer(admin_app(runtime)) as server, aiohttp.ClientSession() as client:

        async def status(method: str, path: str, headers: dict[str, str]) -> int:
            async with client.request(method, server.make_url(path), headers=headers, data=b"[]") as response:
                return response.status

        assert {await status(*each, sent) for each in PROTECTED} == {401}
        assert {await status(*each, sent) for each in OPEN} == {200}
        with_token = {"Authorization": "Bearer token"}
        assert [await status(*each, with_token) for each in PROTECTED] == [404, 404, 404]


def own_address() -> str:
    """An address of this host other than loopback. Skips the test if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no address other than loopback")
        return str(probe.getsockname()[0])


async def test_without_a_token_other_hosts_cannot_access_sessions(runtime: Runtime) -> None:
    # A request to the host's own address has that address as its source.
    async with (
        TestServer(admin_app(runtime), host=own_address()) as server,
        aiohttp.ClientSession() as client,
    ):
        statuses = set()
        for method, path in PROTECTED:
            async with client.request(method, server.make_url(path), data=b"[]") as response:
                statuses.add(response.status)
    assert statuses == {401}


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("127.0.0.6", False),
        ("10.0.0.1", False),
        (None, False),
    ],
)
def test_forwarded_requests_do_not_count_as_local(address: str | None, local: bool) -> None:
    assert is_local(address) is local


@pytest.mark.parametrize(
    ("listen", "environment", "address"),
    [
        pytest.param({}, {}, "127.0.0.1", id="outside a cluster"),
        pytest.param({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "0.0.0.0", id="in a pod"),
        pytest.param({"adminHost": "10.1.2.3"}, {}, "10.1.2.3", id="configured"),
    ],
)
def test_address_of_the_admin_port(listen: dict[str, str], environment: dict[str, str], address: str) -> None:
    assert Listen.model_validate(listen).admin_address(environment) == address


async def decisions(runtime: Runtime) -> tuple[int, str]:
    async with (
        TestServer(admin_app(runtime)) as server,
        aiohttp.ClientSession() as client,
        client.get(server.make_url("/decisions")) as response,
    ):
        return response.status, await response.text()


async def test_the_decision_log_is_served(runtime: Runtime, tmp_path: Path) -> None:
    runtime.decision_log = JsonLog(tmp_path / "decisions.jsonl")
    assert await decisions(runtime) == (200, "")
    runtime.decision_log.add({"turn": 1})
    assert await decisions(runtime) == (200, '{"turn":1}\n')


async def test_a_decision_log_that_is_off_or_cannot_be_read_is_an_error(
    runtime: Runtime, tmp_path: Path
) -> None:
    status, text = await decisions(runtime)
    assert (status, "set routing.decisionLog" in text) == (404, True)
    runtime.decision_log = JsonLog(tmp_path / "missing" / "decisions.jsonl")
    status, text = await decisions(runtime)
    assert (status, "No such file or directory" in text) == (503, True)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://redis:6379/0", "redis://redis:6379/0"),
        ("redis://user:secret@redis/0", "redis://user:***@redis/0"),
        ("redis://redis/0?password=secret", "redis://redis/0?password=***"),
        (
            "redis+sentinel://:secret@a,b/0?service=main&sentinel_password=secret",
            "redis+sentinel://:***@a,b/0?service=***&sentinel_password=***",
        ),
        (None, None),
    ],
)
def test_shown_redis_url_contains_no_password(url: str | None, shown: str | None) -> None:
    assert redacted(url) == shown
