"""Gateways with the objects that the API server holds for DPSRouters with an external session store."""

import asyncio
from pathlib import Path
from typing import Final, Literal

import aiohttp
import pytest

from dps_lab.replay.client import Client, ReplayOptions
from dps_local.stack import MODEL
from dps_operator.builders.credentials import CREDENTIALS
from dps_operator.builders.gateway_config import REDIS_URL_FILE
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import Operator
from dps_testkit.operator.external_stores import NAME, STORES, Store, check_that_sessions_continue
from dps_testkit.operator.gateway_pod import GatewayPod, decoded
from dps_testkit.processes import Gateway, LocalProcesses, RedisServer
from dps_testkit.sessions import play, synthetic_sessions
from dps_testkit.waiting import wait_until
from e2e.cluster.routers import router

pytest_plugins = ["e2e.cluster.fixtures"]

ROUTERS: Final = ("qwen", "other")
RECOGNISED_BY: Final[tuple[Literal["header", "none"], ...]] = ("header", "none")
"""How the gateways recognise a session: by its id, or by its history."""


def store_secret(store: Store) -> Manifest:
    """The Secret of a store."""
    metadata = {"name": NAME}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": store.secret}


def gateway_pod(kube: Kube, name: str) -> GatewayPod:
    """The pod of a DPSRouter's gateway, as the API server has it."""
    live = [kube.get(kind, f"{name}-gateway") for kind in ("deployment", "configmap")]
    secrets = {secret: decoded(kube.get("secret", secret)) for secret in (NAME, CREDENTIALS)}
    return GatewayPod.of(live, secrets)


@pytest.mark.parametrize("kind", ["TLS", "Sentinel", "Cluster"])
async def test_restarted_gateway_continues_the_sessions_of_an_external_store(
    kube: Kube, operator: Operator, kind: str, tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes, STORES[kind](processes, tmp_path) as store:
        kube.apply(store_secret(store), router(**store.spec))
        kube.until("qwen", Ready="True", SessionStoreReady="External")
        await check_that_sessions_continue(gateway_pod(kube, "qwen"), processes, tmp_path)


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


@pytest.mark.usefixtures("operator")
async def test_routers_that_share_a_store_keep_separate_sessions_when_its_password_changes(
    kube: Kube, tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes:
        server = await processes.start_redis()
        store = await set_password(server, "old")
        kube.apply(store_secret(store), *(router(name, **store.spec) for name in ROUTERS))
        for name in ROUTERS:
            kube.until(name, SpecValid="Accepted", SessionStoreReady="External")
        pods = {name: gateway_pod(kube, name) for name in ROUTERS}
        speculative, greedy = await processes.start_engines("speculative", "greedy")
        engines = {"speculative": speculative, "greedy": greedy}
        started = [pod.start(processes, tmp_path / name, engines) for name, pod in pods.items()]
        gateways = dict(zip(pods, await asyncio.gather(*started), strict=True))
        for turn, history in ((1, "new"), (2, "grown")):
            for gateway in gateways.values():
                assert await histories(gateway, turn) == [(history, "redis")] * len(RECOGNISED_BY)

        kube.apply(store_secret(await set_password(server, "new", "old")))
        for name in ROUTERS:
            changed = gateway_pod(kube, name)
            assert changed.deployment["spec"] == pods[name].deployment["spec"], "no restart"
            mount(changed, tmp_path / name)
        for gateway in gateways.values():

            async def reloaded(gateway: Gateway = gateway) -> bool:
                return await gateway.metric("dps_config_reloads_total", outcome="applied") == 1

            await wait_until(reloaded, "the gateway uses the new URL")
            assert await histories(gateway, 3) == [("grown", "redis")] * len(RECOGNISED_BY)
