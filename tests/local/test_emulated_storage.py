"""The emulated storage level of HiCache, compared with measurements of SGLang 0.5.23 servers that share pages."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from dps_local.assets import bundled_tokenizer
from dps_local.emulated_sglang.flags import parse
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.server import create_app
from dps_local.emulated_sglang.settings import EngineSettings
from dps_testkit.clock import VirtualClock
from dps_testkit.data_plane import common_cache
from dps_testkit.engine_contract.storage import GREEDY, SPECULATIVE, Step, play, recording

Client = TestClient[Any, Any]
Start = Callable[..., Awaitable[Client]]

PROMPT = list(range(2000))
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "greedy": (),
    **{name: ("--speculative-algorithm", name) for name in ("NGRAM", "STANDALONE", "EAGLE")},
}


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts.load(str(bundled_tokenizer()))


def settings_of(*flags: str) -> EngineSettings:
    return parse(["--tokenizer-path", str(bundled_tokenizer()), *flags])


@pytest.fixture
async def start(prompts: Prompts, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts engines in virtual time that share pages."""
    async with AsyncExitStack() as stack:

        async def start(*flags: str) -> Client:
            settings = settings_of(*common_cache(tmp_path / "pages"), "--enable-cache-report", *flags)
            app = create_app(settings, prompts, VirtualClock())
            return await stack.enter_async_context(TestClient(TestServer(app)))

        yield start


async def generate(client: Client, prompt: list[int], tokens: int = 1) -> dict[str, Any]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    answer: dict[str, Any] = await (await client.post("/generate", json=body)).json()
    return answer


async def cached(client: Client, prompt: list[int]) -> int:
    """The cached tokens of a request; all of them come from the storage."""
    info = (await generate(client, prompt))["meta_info"]
    tokens: int = info["cached_tokens"]
    if tokens:
        assert info["cached_tokens_details"]["storage"] == tokens
    return tokens


@pytest.mark.parametrize("algorithm", ["STANDALONE", "NGRAM"])
async def test_each_prompt_is_found_as_recorded_from_sglang(start: Start, algorithm: str) -> None:
    """e2e/prefix_cache compares the recordings with real servers."""
    flags = ("--page-size", "64")
    engines = {GREEDY: await start(*flags), SPECULATIVE: await start(*flags, *ALGORITHMS[algorithm])}

    async def request(step: Step) -> dict[str, Any]:
        answer = await (await engines[step.engine].post("/generate", json=step.body)).json()
        info: dict[str, Any] = answer["meta_info"]
        return info

    assert await play(request) == json.loads(recording(algorithm).read_text())


@pytest.mark.parametrize(
    "difference",
    [
        ("--page-size", "16"),
        ("--kv-cache-dtype", "fp8_e5m2"),
        ("--model-path", "another"),
        ("--hicache-storage-backend-extra-config", '{"extra_backend_tag": "another"}'),
    ],
    ids=["page-size", "data-type", "model", "tag"],
)
async def test_engines_of_another_geometry_or_deployment_do_not_share_pages(
    start: Start, difference: tuple[str, ...]
) -> None:
    await generate(await start(), PROMPT)
    assert await cached(await start(*difference), PROMPT) == 0


async def test_engine_without_the_directory_shares_no_pages(prompts: Prompts) -> None:
    """As an engine of a DPSRouter, whose command line is that of SGLang."""
    settings = settings_of("--enable-hierarchical-cache", "--hicache-storage-backend", "mooncake")
    async with TestClient(TestServer(create_app(settings, prompts, VirtualClock()))) as engine:
        details = [(await generate(engine, PROMPT))["meta_info"]["cached_tokens_details"] for _ in range(2)]
    assert details == [None, {"device": 1999, "host": 0}]
