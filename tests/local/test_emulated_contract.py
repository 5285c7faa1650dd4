"""The emulated server's responses match those recorded from SGLang (e2e/real_sglang)."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from dps_local.assets import qwen_tokenizer
from dps_local.emulated_sglang.server import create_app
from dps_local.emulated_sglang.settings import EngineSettings
from dps_local.emulated_sglang.time_model import SPECULATION_DEFAULTS, TimeModel
from dps_testkit.engine_contract.exchange import Case, after_leaving, answers, exposition, recorded
from dps_testkit.engine_contract.observe import Shape, metrics
from dps_testkit.engine_contract.refusals import refusals

TRUTH = recorded()
GREEDY, SPECULATIVE = (
    {case["name"]: case["answer"] for case in TRUTH[pool]} for pool in ("greedy", "speculative")
)
REFUSALS = {case["name"]: case["answer"] for case in TRUTH["refusals"]}
ABSENT = "<absent>"


DELIBERATE = {
    "*server_info.json.emulated": "identifies the server as emulated",
    "*server_info.json.dps_cache_salt_header": "SGLang with the plugin dps_sglang",
    "*server_info.json.context_length": "always reported; SGLang reports it only if the flag is set",
    "*server_info.json.max_running_requests": "always reported; SGLang reports it only if the flag is set",
    "responses: error: input item unknown.json.error.message": "the wording of the gateway's conversion",
    "responses: error: tool choice without tools.json.error.message": "the wording of the gateway's conversion",
}
"""Deliberate differences: `fnmatch` patterns for the case name and field path, and the reasons."""
LACKING = {
    "*server_info.json.*": "only the arguments that have an effect in the emulation",
    "*model_info.json.*": "only the names of the model",
    "*.json.metadata": "versions of weights",
    "*.meta_info.*": "times, and versions of weights",
    "loads*.json.*": "only what the gateway reads",
    "responses*.json.*": "fields of the request that the response repeats",
    "responses*.response.*": "fields of the request that the response repeats",
}
"""Fields that emulated answers may lack."""


def differences(real: Shape, emulated: Shape, path: str = "") -> Iterator[tuple[str, Shape, Shape]]:
    """Yield (path, real, emulated) for each field that differs; a missing field is `ABSENT`."""
    match real, emulated:
        case dict(), dict():
            for key in real | emulated:
                yield from differences(real.get(key, ABSENT), emulated.get(key, ABSENT), f"{path}.{key}")
        case list(), list() if len(real) == len(emulated):
            for index, (left, right) in enumerate(zip(real, emulated, strict=True)):
                yield from differences(left, right, f"{path}.{index}")
        case _ if real != emulated:
            yield path, real, emulated


def explanations(path: str, emulated: Shape) -> set[str]:
    """The patterns of the deliberate differences that a difference matches."""
    patterns = [*DELIBERATE, *(LACKING if emulated == ABSENT else ())]
    return {pattern for pattern in patterns if fnmatchcase(path, pattern)}


def unexplained(real: Shape, emulated: Shape, name: str) -> dict[str, tuple[Shape, Shape]]:
    """The differences of a case that are not deliberate."""
    return {
        path: (expected, actual)
        for path, expected, actual in differences(real, emulated, name)
        if not explanations(path, actual)
    }


async def ask(settings: EngineSettings, cases: Iterable[Case]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The responses of an emulated engine to the cases, in order, and its metrics afterwards."""
    async with TestServer(create_app(settings)) as server, ClientSession(server.make_url("/")) as client:
        return await answers(client, cases), metrics(await exposition(client))


@pytest.fixture(scope="module")
def settings() -> EngineSettings:
    tokenizer = qwen_tokenizer()
    if tokenizer.source != "registry":
        pytest.skip(f"needs Qwen2.5's tokenizer; only {tokenizer.description} is available")
    return EngineSettings(str(tokenizer.path), speed=1000, enable_response_store=True)


@pytest.fixture(scope="module")
def greedy(settings: EngineSettings) -> tuple[dict[str, Shape], dict[str, Shape]]:
    return asyncio.run(ask(settings, TRUTH["greedy"]))


@pytest.fixture(scope="module")
def refused(settings: EngineSettings) -> dict[str, Shape]:
    async def ask() -> dict[str, Shape]:
        limited = replace(settings, speed=1, max_running_requests=1, max_queued_requests=1)
        async with TestServer(create_app(limited)) as server, ClientSession(server.make_url("/")) as client:
            return await refusals(client)

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def speculative(settings: EngineSettings) -> tuple[dict[str, Shape], dict[str, Shape]]:
    time_model = TimeModel(speculation=SPECULATION_DEFAULTS["STANDALONE"])
    return asyncio.run(ask(replace(settings, time_model=time_model), TRUTH["speculative"]))


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_engine_matches_sglang(name: str, greedy: tuple[dict[str, Shape], ...]) -> None:
    assert unexplained(GREEDY[name], greedy[0][name], name) == {}


@pytest.mark.parametrize("name", SPECULATIVE)
def test_speculative_engine_matches_sglang(name: str, speculative: tuple[dict[str, Shape], ...]) -> None:
    assert unexplained(SPECULATIVE[name], speculative[0][name], name) == {}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_and_aborted_answers_match_sglang(name: str, refused: dict[str, Shape]) -> None:
    assert unexplained(REFUSALS[name], refused[name], name) == {}


def test_every_deliberate_difference_exists(greedy: tuple[dict[str, Shape], ...]) -> None:
    found = [
        explanations(path, emulated)
        for name, shape in greedy[0].items()
        for path, _, emulated in differences(GREEDY[name], shape, name)
    ]
    assert set().union(*found) == {*DELIBERATE, *LACKING}


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
