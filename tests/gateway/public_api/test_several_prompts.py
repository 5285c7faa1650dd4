"""Requests with several prompts."""

import asyncio
import threading

import pytest

from dps_gateway.api.endpoints.base import MAX_PROMPTS
from dps_gateway.prompt import renderer
from dps_testkit.in_process_gateway import InProcessGateway, ScriptedEngine, chat
from dps_testkit.tokenizers import shared_tokenizer

COMPLETIONS = "/v1/completions"


async def test_all_prompts_are_counted(gateway: InProcessGateway) -> None:
    one, _ = await gateway.post(COMPLETIONS, json={"prompt": "a few words"})
    several, _ = await gateway.post(COMPLETIONS, json={"prompt": ["a few words"] * MAX_PROMPTS})
    assert several.headers["x-dps-history"] == "stateless"
    length = int(one.headers["x-dps-prompt-tokens"])
    assert int(several.headers["x-dps-prompt-tokens"]) == length * MAX_PROMPTS


async def test_too_many_prompts_are_forwarded_without_being_counted(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    response, _ = await gateway.post(COMPLETIONS, json={"prompt": ["a"] * (MAX_PROMPTS + 1)})
    assert (response.status, len(engine.requests)) == (200, 1)
    assert response.headers["x-dps-history"] == "stateless"
    assert "x-dps-prompt-tokens" not in response.headers


async def test_other_requests_are_served_while_prompts_are_counted(
    gateway: InProcessGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt is short, but together they are long."""
    monkeypatch.setattr(renderer, "LONG_TEXT_BYTES", 10_000)
    counting, served = threading.Event(), threading.Event()
    others_served: list[bool] = []

    def count(text: str) -> int:
        if text == "the first prompt":
            counting.set()
            others_served.append(served.wait(10))
        return 1

    monkeypatch.setattr(shared_tokenizer(), "count", count)
    prompts = ["the first prompt", *["a further prompt"] * 3000]
    batch = asyncio.create_task(gateway.post(COMPLETIONS, json={"prompt": prompts}))
    await asyncio.to_thread(counting.wait, 10)
    other, _ = await gateway.post(json=chat())
    served.set()
    response, _ = await batch
    assert (other.status, others_served) == (200, [True])
    assert response.headers["x-dps-prompt-tokens"] == "3001"
