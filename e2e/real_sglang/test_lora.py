"""LoRA adapters in SGLang on the CPU, started with the operator's flags: requests through the gateway use them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.chat import ChatCompletionMessageParam

from dps_engines.pools import POOLS, PoolName
from dps_local.processes import Child, free_ports
from dps_local.sglang import CPU, CPU_SPECULATION
from dps_local.stack import MODEL
from dps_operator.build.launch import engine_arguments
from dps_testkit.http import metric, status_of
from dps_testkit.operator.routers import router
from dps_testkit.processes import Engine, Gateway, LocalProcesses
from e2e.prefix_cache.hicache import install
from e2e.real_sglang.chat_turns import send
from e2e.real_sglang.local_sglang import PYTHON, adapter, tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]

LOAD_SECONDS = 900.0
"""Time limit for loading two engines on a busy machine; an idle one with two cores needs half a minute."""
STOP_SECONDS = 30.0
ADAPTERS = {"sql": 1, "chat": 2}
"""The adapters, and the seeds of their weights."""
MODELS = (MODEL, *(f"{MODEL}:{name}" for name in ADAPTERS))
"""What a request can name: the model, and each of its adapters."""
ON_CPU = [
    *CPU,
    *("--mem-fraction-static", "0.8"),  # other processes may allocate memory while the engine loads
    *("--lora-backend", "torch_native"),  # the other backends need a GPU
]
SPECULATION_ON_CPU = [*CPU_SPECULATION, "--speculative-ngram-capacity", "100000"]
"""The default capacity of Ngram needs 1.5 GB."""
THRESHOLD_TOKENS = 64
LONG = "Every word of this is prefilled by one engine and not by the other. " * 12
SHORT = "And then?"
ANSWER_TOKENS = 12


def command(pool: PoolName, port: int) -> list[str]:
    """How to start an engine of a DPSRouter with adapters, on the CPU. The last value of a flag applies."""
    adapters = [{"name": name, "path": str(adapter(seed))} for name, seed in ADAPTERS.items()]
    made = router(
        {
            "model": {"name": str(tiny_model()), "servedName": MODEL, "adapters": adapters},
            "pools": {"speculative": {"speculation": {"algorithm": "Ngram"}}},
        }
    )
    operators = engine_arguments(made, pool)
    assert "--lora-paths" in operators
    local = ["--host", "127.0.0.1", "--port", str(port), *ON_CPU]
    speculation = SPECULATION_ON_CPU if pool == "speculative" else []
    return [str(PYTHON), "-m", "sglang.launch_server", *operators, *local, *speculation]


def engine(pool: PoolName, folder: Path) -> Engine:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"

    async def ready() -> bool:
        return await status_of(f"{url}/health") == 200

    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "CUDA_VISIBLE_DEVICES": ""}
    return Engine(Child(pool, command(pool, port), folder / f"{pool}.log", ready, environment), url)


@dataclass(frozen=True)
class Stack:
    """A gateway, and an engine of each pool."""

    gateway: Gateway
    engines: dict[PoolName, Engine]

    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    install()
    folder = tmp_path_factory.mktemp("lora")
    engines = {pool: engine(pool, folder) for pool in POOLS}
    try:
        for each in engines.values():
            each.child.start()
        await asyncio.gather(*(each.child.wait_ready(LOAD_SECONDS) for each in engines.values()))
        async with LocalProcesses(folder, tiny_model()) as processes:
            gateway = await processes.start_gateway(
                [engines["speculative"]],
                [engines["greedy"]],
                {"routing": {"policy": "DeltaPrefill", "thresholdTokens": THRESHOLD_TOKENS}},
            )
            yield Stack(gateway, engines)
    finally:
        await asyncio.gather(*(each.child.stop(STOP_SECONDS) for each in engines.values()))


async def generate(engine: Engine, text: str, lora: str | None) -> str:
    """What an engine generates at temperature 0, asked with SGLang's own field for adapters."""
    body = {
        "text": text,
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS},
        "lora_path": lora,
    }
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(f"{engine.url}/generate", json=body) as response,
    ):
        return str((await response.json())["text"])


async def test_engines_of_both_pools_answer_alike_and_each_adapter_differently(stack: Stack) -> None:
    answers = {
        pool: [await generate(each, LONG, lora) for lora in (None, *ADAPTERS)]
        for pool, each in stack.engines.items()
    }
    assert answers["speculative"] == answers["greedy"]
    assert len(set(answers["greedy"])) == len(MODELS)


async def test_session_with_an_adapter_is_routed_by_its_own_growth(stack: Stack) -> None:
    async with stack.client() as client:
        firsts = []
        for model in MODELS:
            prompt: list[ChatCompletionMessageParam] = [{"role": "user", "content": LONG}]
            first = await send(client, model, prompt, ANSWER_TOKENS)
            second = await send(
                client, model, [*prompt, first.message, {"role": "user", "content": SHORT}], ANSWER_TOKENS
            )
            assert [turn.headers["x-dps-history"] for turn in (first, second)] == ["new", "grown"]
            assert [turn.headers["x-dps-pool"] for turn in (first, second)] == ["greedy", "speculative"]
            assert first.counted == (first.prompt_tokens, first.prompt_tokens)
            assert second.counted == (second.prompt_tokens, second.prompt_tokens - first.prompt_tokens)
            assert first.cached_tokens == 0, "the engine has used another model's prefix"
            firsts.append(first)
    assert len({first.text for first in firsts}) == len(MODELS)
    assert len({first.headers["x-dps-session"] for first in firsts}) == len(MODELS)
    verified = await metric(stack.engines["speculative"].url, "sglang:spec_verify_calls_total")
    assert verified > 0


async def test_unknown_adapter_and_unknown_model_are_refused(stack: Stack) -> None:
    question: list[ChatCompletionMessageParam] = [{"role": "user", "content": SHORT}]
    async with stack.client() as client:
        with pytest.raises(BadRequestError, match="has never been loaded: unknown"):
            await send(client, f"{MODEL}:unknown", question, ANSWER_TOKENS)
        with pytest.raises(NotFoundError, match="is not served"):
            await send(client, "other:sql", question, ANSWER_TOKENS)
