"""A gateway with the objects that the API server holds for a DPSRouter with an external session store."""

from pathlib import Path

import pytest

from dps_operator.builders.credentials import CREDENTIALS
from dps_testkit.cluster.kube import Kube, Manifest
from dps_testkit.cluster.operator import Operator
from dps_testkit.operator.external_stores import NAME, STORES, check_that_sessions_continue
from dps_testkit.operator.gateway_pod import GatewayPod, decoded
from dps_testkit.processes import LocalProcesses
from e2e.cluster.routers import router

pytest_plugins = ["e2e.cluster.fixtures"]


@pytest.mark.parametrize("kind", ["TLS", "Sentinel", "Cluster"])
async def test_restarted_gateway_continues_the_sessions_of_an_external_store(
    kube: Kube, operator: Operator, kind: str, tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes, STORES[kind](processes, tmp_path) as store:
        secret: Manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": NAME},
            "stringData": store.secret,
        }
        kube.apply(secret, router(**store.spec))
        kube.until("qwen", Ready="True", SessionStoreReady="External")
        live = [kube.get("deployment", "qwen-gateway"), kube.get("configmap", "qwen-gateway")]
        secrets = {name: decoded(kube.get("secret", name)) for name in (NAME, CREDENTIALS)}
        pod = GatewayPod.of(live, secrets)
        await check_that_sessions_continue(pod, processes, tmp_path)
