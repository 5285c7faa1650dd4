"""External session stores of a DPSRouter: a gateway with the files that the operator gives it keeps its sessions."""

from pathlib import Path

import pytest

from dps_operator.builders.children import children
from dps_operator.builders.credentials import CREDENTIALS
from dps_operator.builders.gateway import admin_entries
from dps_testkit.operator.external_stores import NAME, STORES, check_that_sessions_continue
from dps_testkit.operator.gateway_pod import GatewayPod
from dps_testkit.operator.routers import SETTINGS, SMALLEST, router
from dps_testkit.processes import LocalProcesses


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", STORES)
async def test_restarted_gateway_continues_the_sessions_of_an_external_store(
    kind: str, tmp_path: Path
) -> None:
    async with LocalProcesses(tmp_path) as processes, STORES[kind](processes, tmp_path) as store:
        made = children(router({**SMALLEST, **store.spec}), SETTINGS, "")
        secrets = {NAME: store.secret, CREDENTIALS: admin_entries("serving", "qwen", "token")}
        await check_that_sessions_continue(GatewayPod.of(made, secrets), processes, tmp_path)
