"""The emulated server's responses match those recorded from SGLang (e2e/real_sglang)."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from dps_local.assets import qwen_tokenizer
from dps_local.emulated_sglang.server import create_app
from dps_local.emulated_sglang.settings import EngineSettings
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, TimeModel
from dps_testkit.engine_contract.cases import GREEDY, SPECULATIVE, Case
from dps_testkit.engine_contract.compare import KnownDifference, unexplained, unused
from dps_testkit.engine_contract.exchange import after_leaving, exposition, send
from dps_testkit.engine_contract.observe import Shape, describe, metrics

TRUTH = json.loads((Path(__file__).parent / "contract/sglang-0.5.23.json").read_text())

DELIBERATE = (
    KnownDifference(
        "*server_info.json.*", "only the arguments that have an effect in the emulation", lacking=True
    ),
    KnownDifference("*server_info.json.emulated", "identifies the server as emulated"),
    KnownDifference("*server_info.json.emulation", "the parameters of the emulation"),
    KnownDifference("*server_info.json.dps_cache_salt_header", "SGLang with the plugin dps_sglang"),
    KnownDifference(
        "*server_info.json.context_length", "always reported; SGLang reports it only if the flag is set"
    ),
    KnownDifference(
        "*server_info.json.max_running_requests",
        "always reported; SGLang reports it only if the flag is set",
    ),
    *(
        KnownDifference(
            f"responses: error: {name}.json.error.message", "the wording of the gateway's conversion"
        )
        for name in ("input item unknown", "tool choice without tools")
    ),
    KnownDifference("*model_info.json.embedding", "embeddings are not emulated", lacking=True),
)


async def ask(settings: EngineSettings, cases: Iterable[Case]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The responses of an emulated engine to the cases, in order, and its metrics afterwards."""
    async with TestServer(create_app(settings)) as server, ClientSession(server.make_url("/")) as client:
        answers = {case.name: describe(await send(client, case)) for case in cases}
        return answers, metrics(await exposition(client))


@pytest.fixture(scope="module")
def settings() -> EngineSettings:
    tokenizer = qwen_tokenizer()
    if tokenizer.source != "registry":
        pytest.skip(f"needs Qwen2.5's tokenizer; only {tokenizer.description} is available")
    return EngineSettings(str(tokenizer.path), speed=1000, enable_response_store=True)


@pytest.fixture(scope="module")
def greedy(settings: EngineSettings) -> tuple[dict[str, Shape], dict[str, Shape]]:
    return asyncio.run(ask(settings, GREEDY))


@pytest.fixture(scope="module")
def speculative(settings: EngineSettings) -> tuple[dict[str, Shape], dict[str, Shape]]:
    time_model = TimeModel(speculation=SPECULATION_DEFAULTS["STANDALONE"])
    return asyncio.run(ask(replace(settings, time_model=time_model), SPECULATIVE))


@pytest.mark.parametrize("name", [case.name for case in GREEDY])
def test_greedy_engine_matches_sglang(name: str, greedy: tuple[dict[str, Shape], ...]) -> None:
    assert unexplained(TRUTH["greedy"], {name: greedy[0][name]}, DELIBERATE) == {}


@pytest.mark.parametrize("name", [case.name for case in SPECULATIVE])
def test_speculative_engine_matches_sglang(name: str, speculative: tuple[dict[str, Shape], ...]) -> None:
    assert unexplained(TRUTH["speculative"], {name: speculative[0][name]}, DELIBERATE) == {}


def test_every_deliberate_difference_exists(greedy: tuple[dict[str, Shape], ...]) -> None:
    assert unused(TRUTH["greedy"], greedy[0], DELIBERATE) == []


@pytest.mark.parametrize("pool", ["greedy", "speculative"])
def test_metrics_have_the_names_types_and_labels_of_sglang(pool: str, request: pytest.FixtureRequest) -> None:
    recorded = TRUTH["metrics" if pool == "greedy" else "speculative metrics"]
    _, emulated = request.getfixturevalue(pool)
    assert emulated == {name: recorded.get(name) for name in emulated}


@pytest.mark.parametrize(
    ("stream", "recorded"),
    [(True, "client left a stream"), (False, "client left an answer")],
    ids=["during a stream", "before a complete answer"],
)
async def test_client_disconnect_has_the_same_effect(
    stream: bool, recorded: str, settings: EngineSettings
) -> None:
    unhurried = create_app(replace(settings, speed=1))
    async with TestServer(unhurried) as server, ClientSession(server.make_url("/")) as client:
        assert await after_leaving(client, stream=stream) == TRUTH[recorded]
