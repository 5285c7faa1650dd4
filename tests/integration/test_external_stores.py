"""External session stores of a DPSRouter: gateways with the files that the operator gives them keep their sessions."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import aiohttp
import pytest

from dps_lab.replay.client import Client, ReplayOptions
from dps_local.assets import bundled_tokenizer
from dps_local.stack import MODEL
from dps_operator.api import CA_FILE
from dps_operator.build import children
from dps_operator.build.gateway import ADMIN_TOKEN_KEY, REDIS_URL_FILE
from dps_operator.objects import CREDENTIALS, credential_entry
from dps_testkit.certificates import certify
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router
from dps_testkit.processes import Gateway, LocalProcesses, RedisServer
from dps_testkit.sessions import decided, expected, play, synthetic_sessions
from dps_testkit.waiting import wait_until
from tests.integration.gateway_pod import GatewayPod
from tests.integration.redis_servers import tls_in_front_of

ROUTERS: Final = ("qwen", "other")
RECOGNISED_BY: Final[tuple[Literal["header", "none"], ...]] = ("header", "none")
"""How the gateways recognise a session: by its id, or by its history."""

NAME = "sessions"
"""The Secret of the store."""

TIMEOUT_SECONDS = 10
"""The gateway's time limit for a request. On a busy machine, a TLS handshake can take longer than the default."""


@dataclass(frozen=True)
class Store:
    """The plain values of a store's Secret."""

    secret: dict[str, str]

    @property
    def spec(self) -> dict[str, Any]:
        """The fields of a DPSRouter that uses the store, and a tokenizer on this machine."""
        references = {"urlSecretRef": "url", "caSecretRef": "ca.crt"}
        section: dict[str, Any] = {
            field: {"name": NAME, "key": key} for field, key in references.items() if key in self.secret
        }
        section["timeoutSeconds"] = TIMEOUT_SECONDS
        return {"model": {"name": MODEL, "tokenizer": str(bundled_tokenizer())}, "sessionStore": section}


@asynccontextmanager
async def store_behind_tls(processes: LocalProcesses, folder: Path) -> AsyncIterator[Store]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is needed to create a certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certify(certificate, key)
    async with tls_in_front_of(await processes.start_redis(), certificate, key) as port:
        url = f"rediss://localhost:{port}/0?ssl_ca_certs={CA_FILE}"
        yield Store({"url": url, "ca.crt": certificate.read_text()})


async def check_that_sessions_continue(pod: GatewayPod, processes: LocalProcesses, folder: Path) -> None:
    """Send two turns of a session to a gateway, and the other two to its replacement; compare all decisions."""
    (session,) = synthetic_sessions(1, turns=4)
    speculative, greedy = await processes.start_engines("speculative", "greedy")
    records = []
    for number, turns in enumerate(([1, 2], [3, 4])):
        gateway = await pod.start(
            processes, folder / f"pod-{number}", {"speculative": speculative, "greedy": greedy}
        )
        async with aiohttp.ClientSession() as http:
            client = Client(http, ReplayOptions([f"{gateway.url}/v1"], MODEL, attempts=1))
            records += await play(client, session, turns)
        assert await gateway.metric("dps_state_degraded") == 0
        gateway.child.kill()
    assert [decided(record) for record in records] == expected([session])[session.id]
    assert [record.verdict.state for record in records] == ["redis"] * len(records)
    assert [record.verdict.history for record in records] == ["new", "grown", "grown", "grown"]


def gateway_pod(name: str, store: Store) -> GatewayPod:
    """The pod of a DPSRouter's gateway."""
    made = children(router({**SMALLEST, **store.spec}, name), SETTINGS, "")
    entries = {credential_entry(each, "gateway", ADMIN_TOKEN_KEY): "token" for each in ROUTERS}
    return GatewayPod.of(made, {NAME: store.secret, CREDENTIALS: entries})


@pytest.mark.timeout(240)
async def test_restarted_gateway_continues_the_sessions_of_an_external_store(tmp_path: Path) -> None:
    """Redis behind Sentinel and Cluster: test_redis_servers."""
    async with LocalProcesses(tmp_path) as processes, store_behind_tls(processes, tmp_path) as store:
        await check_that_sessions_continue(gateway_pod("qwen", store), processes, tmp_path)


async def set_password(server: RedisServer, password: str, previous: str = "") -> Store:
    """Set the password of a Redis server, and end all connections; returns the Secret with the new URL."""
    async with server.client(previous) as admin:
        await admin.config_set("requirepass", password)
        await admin.client_kill_filter(_type="normal", skipme=True)
    return Store({"url": f"redis://:{password}@127.0.0.1:{server.port}/0"})


def mount(pod: GatewayPod, folder: Path) -> None:
    """Update the mounted file with the URL of the store, as the kubelet does after a change of the Secret."""
    Path(f"{folder}{REDIS_URL_FILE}").write_text(pod.secrets[NAME]["url"])


async def histories(gateway: Gateway, turn: int) -> list[tuple[str | None, str | None]]:
    """What a gateway found of one turn of a session, and where, for each way to recognise the session."""
    found = []
    async with aiohttp.ClientSession() as http:
        for ids in RECOGNISED_BY:
            options = ReplayOptions([f"{gateway.url}/v1"], MODEL, attempts=1, session_ids=ids)
            (session,) = synthetic_sessions(1, turns=turn, topic=ids)
            (record,) = await play(Client(http, options), session, [turn])
            found.append((record.verdict.history, record.verdict.state))
    return found


@pytest.mark.timeout(240)
async def test_routers_that_share_a_store_keep_separate_sessions_when_its_password_changes(
    tmp_path: Path,
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        server = await processes.start_redis()
        store = await set_password(server, "old")
        pods = {name: gateway_pod(name, store) for name in ROUTERS}
        speculative, greedy = await processes.start_engines("speculative", "greedy")
        engines = {"speculative": speculative, "greedy": greedy}
        started = [pod.start(processes, tmp_path / name, engines) for name, pod in pods.items()]
        gateways = dict(zip(pods, await asyncio.gather(*started), strict=True))
        for turn, history in ((1, "new"), (2, "grown")):
            for gateway in gateways.values():
                assert await histories(gateway, turn) == [(history, "redis")] * len(RECOGNISED_BY)

        store = await set_password(server, "new", "old")
        for name in ROUTERS:
            changed = gateway_pod(name, store)
            assert changed.deployment["spec"] == pods[name].deployment["spec"], "no restart"
            mount(changed, tmp_path / name)
        for gateway in gateways.values():

            async def reloaded(gateway: Gateway = gateway) -> bool:
                return await gateway.metric("dps_config_reloads_total", outcome="applied") == 1

            await wait_until(reloaded, "the gateway uses the new URL")
            assert await histories(gateway, 3) == [("grown", "redis")] * len(RECOGNISED_BY)
