"""External session stores of a DPSRouter: gateways with the files that the operator gives them keep their sessions."""

import asyncio
import shutil
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
from dps_testkit.sessions import play, synthetic_sessions
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


SPEC: Final[dict[str, Any]] = {
    "model": {"name": MODEL, "tokenizer": str(bundled_tokenizer())},
    "sessionStore": {
        "urlSecretRef": {"name": NAME, "key": "url"},
        "caSecretRef": {"name": NAME, "key": "ca.crt"},
        "timeoutSeconds": TIMEOUT_SECONDS,
    },
}
"""The fields of a DPSRouter that uses the store, and a tokenizer on this machine."""


def gateway_pod(name: str, secret: dict[str, str]) -> GatewayPod:
    """The pod of a DPSRouter's gateway. secret: the plain values of the store's Secret."""
    made = children(router({**SMALLEST, **SPEC}, name), SETTINGS, "")
    entries = {credential_entry(each, "gateway", ADMIN_TOKEN_KEY): "token" for each in ROUTERS}
    return GatewayPod.of(made, {NAME: secret, CREDENTIALS: entries})


async def set_password(server: RedisServer, password: str, previous: str = "") -> None:
    """Set the password of a Redis server, and end all connections."""
    async with server.client(previous) as admin:
        await admin.config_set("requirepass", password)
        await admin.client_kill_filter(_type="normal", skipme=True)


def mount(pod: GatewayPod, folder: Path) -> None:
    """Update the mounted file with the URL of the store, as the kubelet does after a change of the Secret."""
    Path(f"{folder}{REDIS_URL_FILE}").write_text(pod.mapped(pod.secrets[NAME]["url"], folder))


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
@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is needed to create a certificate")
async def test_routers_that_share_a_store_keep_separate_sessions_when_its_password_changes(
    tmp_path: Path,
) -> None:
    """Redis behind TLS. Behind Sentinel and Cluster: test_redis_servers."""
    certify(certificate := tmp_path / "certificate.pem", tmp_path / "key.pem")
    async with (
        LocalProcesses(tmp_path) as processes,
        tls_in_front_of(server := await processes.start_redis(), certificate, tmp_path / "key.pem") as port,
    ):

        def store(password: str) -> dict[str, str]:
            url = f"rediss://:{password}@localhost:{port}/0?ssl_ca_certs={CA_FILE}"
            return {"url": url, "ca.crt": certificate.read_text()}

        await set_password(server, "old")
        pods = {name: gateway_pod(name, store("old")) for name in ROUTERS}
        speculative, greedy = await processes.start_engines("speculative", "greedy")
        engines = {"speculative": speculative, "greedy": greedy}
        started = [pod.start(processes, tmp_path / name, engines) for name, pod in pods.items()]
        gateways = dict(zip(pods, await asyncio.gather(*started), strict=True))
        for turn, history in ((1, "new"), (2, "grown")):
            for gateway in gateways.values():
                assert await histories(gateway, turn) == [(history, "redis")] * len(RECOGNISED_BY)

        await set_password(server, "new", "old")
        for name in ROUTERS:
            changed = gateway_pod(name, store("new"))
            assert changed.deployment["spec"] == pods[name].deployment["spec"], "no restart"
            mount(changed, tmp_path / name)
        for gateway in gateways.values():

            async def reloaded(gateway: Gateway = gateway) -> bool:
                return await gateway.metric("dps_config_reloads_total", outcome="applied") == 1

            await wait_until(reloaded, "the gateway uses the new URL")
            assert await histories(gateway, 3) == [("grown", "redis")] * len(RECOGNISED_BY)
            gateway.child.kill()

        restarted = await gateway_pod("qwen", store("new")).start(processes, tmp_path / "qwen", engines)
        assert await histories(restarted, 4) == [("grown", "redis")] * len(RECOGNISED_BY)
