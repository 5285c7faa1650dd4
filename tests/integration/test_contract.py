"""The public contract with API keys enabled: headers, admin port, metrics and `dps session`."""

import json
import subprocess
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from dps_local.stack import DPS
from dps_testkit.data_plane import CHAT, chat, posted
from dps_testkit.processes import Engine, Gateway, LocalProcesses

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = "team-a:sk-alpha\nteam-b:sk-beta\n"
REDIS_PASSWORD = "hunter2"
ALPHA = {"Authorization": "Bearer sk-alpha"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("contract")
    (folder / "keys").write_text(KEYS)
    async with LocalProcesses(folder) as processes:
        redis = await processes.start_redis()
        async with redis.client() as client:
            await client.config_set("requirepass", REDIS_PASSWORD)
        url = redis.url.replace("redis://", f"redis://:{REDIS_PASSWORD}@")
        yield await processes.start_gateway(
            [engines[0]],
            [engines[1]],
            {
                "session": {"redisUrl": url, "redisTimeoutSeconds": 10},
                "auth": {"keysFile": str(folder / "keys")},
            },
        )


def dps_headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {
        name.lower(): value for name, value in response.headers.items() if name.lower().startswith("x-dps-")
    }


async def test_turn_has_decision_headers(gateway: Gateway) -> None:
    sent = ALPHA | {"x-session-id": "s", "x-request-id": "mine"}
    async with posted(gateway.url + CHAT, chat(), **sent) as response:
        prompt_tokens = str((await response.json())["usage"]["prompt_tokens"])
    headers = dps_headers(response)
    assert headers.pop("x-dps-session").startswith("dps-")
    assert headers == {
        "x-dps-pool": "speculative",
        "x-dps-reason": "within_threshold",
        "x-dps-prompt-tokens": prompt_tokens,
        "x-dps-delta-tokens": prompt_tokens,
        "x-dps-turn": "1",
        "x-dps-state": "redis",
        "x-dps-history": "new",
    }
    assert response.headers["x-request-id"] == "mine"


async def test_session_can_be_shown_and_deleted(gateway: Gateway) -> None:
    sent = ALPHA | {"x-session-id": "looked at"}
    async with posted(gateway.url + CHAT, chat(), **sent) as response:
        headers = dps_headers(response)
        await response.read()
    document = await gateway.document("/sessions/looked%20at?tenant=team-a")
    assert document == await gateway.document(f"/sessions/{headers['x-dps-session']}?tenant=team-a")
    assert (document["turn"], document["source"]) == (1, "redis")
    assert [point["promptTokens"] for point in document["points"]] == [int(headers["x-dps-prompt-tokens"])]
    assert "error" in await gateway.document("/sessions/looked%20at?tenant=team-b")

    def dps_session(action: str, tenant: str = "team-a") -> subprocess.CompletedProcess[str]:
        options = ["--config", str(gateway.file), "--tenant", tenant]
        return subprocess.run(
            [*DPS, "session", action, "looked at", *options], capture_output=True, text=True
        )

    assert json.loads(dps_session("show").stdout) == document
    assert dps_session("show", tenant="team-b").returncode == 1
    assert dps_session("delete").returncode == 0
    assert dps_session("show").returncode == 1


async def test_admin_port_exposes_no_secret(gateway: Gateway) -> None:
    async with aiohttp.ClientSession() as http:
        for path in ("/livez", "/readyz", "/metrics", "/pools", "/config"):
            async with http.get(gateway.admin + path) as response:
                assert response.status == 200
                text = await response.text()
                assert not {REDIS_PASSWORD, "sk-alpha", "sk-beta"} & set(text.replace('"', " ").split())
                assert REDIS_PASSWORD not in text


async def test_metrics_have_the_names_types_and_labels_of_the_contract(gateway: Gateway) -> None:
    async with posted(gateway.url + CHAT, chat(stream=True), **ALPHA) as response:
        await response.read()
    async with aiohttp.ClientSession() as http, http.get(f"{gateway.admin}/metrics") as response:
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    kinds = {
        "dps_route_decisions": "counter",
        "dps_delta_tokens": "histogram",
        "dps_prompt_tokens": "histogram",
        "dps_gateway_overhead_seconds": "histogram",
        "dps_time_to_first_token_seconds": "histogram",
        "dps_time_per_output_token_seconds": "histogram",
        "dps_in_flight": "gauge",
        "dps_state_degraded": "gauge",
        "dps_token_count_mismatch": "counter",
        "dps_history": "counter",
        "gen_ai_server_request_duration_seconds": "histogram",
    }
    assert {name: families[name].type for name in kinds} == kinds
    labels = {name: set(families[name].samples[0].labels) - {"le"} for name in kinds}
    assert labels["dps_route_decisions"] == {"pool", "reason"}
    assert labels["dps_time_to_first_token_seconds"] == {"pool"}
    assert labels["dps_in_flight"] == {"pool"}
    assert labels["dps_history"] == {"kind"}
