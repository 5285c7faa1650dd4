"""External session stores of a DPSRouter, and a session that continues in a restarted gateway."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dps_lab.replay.client import Client, ReplayOptions
from dps_local.assets import bundled_tokenizer
from dps_local.stack import MODEL
from dps_operator.api.session_store import CA_FILE
from dps_testkit.certificates import certify
from dps_testkit.operator.gateway_pod import GatewayPod
from dps_testkit.processes import LocalProcesses
from dps_testkit.redis_servers import MASTER, clustered, monitored, tls_in_front_of
from dps_testkit.sessions import decided, expected, play, synthetic_sessions

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
async def _tls(processes: LocalProcesses, folder: Path) -> AsyncIterator[Store]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is needed to create a certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certify(certificate, key)
    async with tls_in_front_of(await processes.start_redis(), certificate, key) as port:
        url = f"rediss://localhost:{port}/0?ssl_ca_certs={CA_FILE}"
        yield Store({"url": url, "ca.crt": certificate.read_text()})


@asynccontextmanager
async def _sentinel(processes: LocalProcesses, folder: Path) -> AsyncIterator[Store]:
    watcher = await monitored(processes, await processes.start_redis())
    yield Store({"url": f"redis+sentinel://127.0.0.1:{watcher.port}/0?service={MASTER}"})


@asynccontextmanager
async def _cluster(processes: LocalProcesses, folder: Path) -> AsyncIterator[Store]:
    nodes = await clustered(processes)
    yield Store({"url": f"redis+cluster://127.0.0.1:{nodes[0].port}/0"})


STORES = {"TLS": _tls, "Sentinel": _sentinel, "Cluster": _cluster}
"""Servers of each kind, as context managers that start them among a test's processes; a folder receives their files."""


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
