"""Model names in requests: aliases, adapters and unknown names."""

import json
from typing import Any

import pytest

from dps_testkit.in_process_gateway import CHAT, InProcessGateway, ScriptedEngine, chat, message_of


@pytest.fixture(autouse=True)
def model(gateway: InProcessGateway) -> None:
    config = gateway.runtime.config
    aliases = {"gpt": "m", "tuned": "m:lora", "gpt:7b": "m"}
    model = config.model.model_copy(update={"aliases": aliases})
    gateway.runtime.config = config.model_copy(update={"model": model})


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize(
    ("asked", "forwarded"),
    [
        ({"model": "m"}, {"model": "m"}),
        ({"model": "m:lora"}, {"model": "m:lora"}),
        ({"model": "default"}, {"model": "m"}),
        ({"model": "default:lora"}, {"model": "m:lora"}),
        ({"model": "gpt"}, {"model": "m"}),
        ({"model": "gpt:lora"}, {"model": "m:lora"}),
        ({"model": "gpt:7b"}, {"model": "m"}),
        ({"model": "tuned"}, {"model": "m:lora"}),
        ({"model": ""}, {"model": ""}),
        ({}, {}),
    ],
)
async def test_alias_is_replaced(
    gateway: InProcessGateway,
    engine: ScriptedEngine,
    path: str,
    asked: dict[str, str],
    forwarded: dict[str, str],
) -> None:
    rest = {"messages": [{"role": "user", "content": "hello"}]}
    assert (await gateway.post(path, json=rest | asked))[0].status == 200
    assert json.loads(engine.requests[0][2]) == rest | forwarded


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
@pytest.mark.parametrize("asked", ["other", "mm", "other:lora", ["m"], 1])
async def test_unknown_model_is_not_found(
    gateway: InProcessGateway, engine: ScriptedEngine, path: str, asked: Any
) -> None:
    response, content = await gateway.post(path, json=chat(model=asked))
    assert (response.status, json.loads(content)["error"]["code"]) == (404, "model_not_found")
    served = "m, gpt, gpt:7b, tuned"
    assert message_of(content) == f"the model '{asked}' is not served; the served models are {served}"
    assert engine.requests == []


async def test_unknown_model_is_forwarded_if_the_engines_decide(
    gateway: InProcessGateway, engine: ScriptedEngine
) -> None:
    config = gateway.runtime.config
    model = config.model.model_copy(update={"strict": False})
    gateway.runtime.config = config.model_copy(update={"model": model})
    assert (await gateway.post(json=chat(model="other")))[0].status == 200
    assert json.loads(engine.requests[0][2])["model"] == "other"


async def test_body_that_is_not_json_is_relayed(gateway: InProcessGateway, engine: ScriptedEngine) -> None:
    audio = {"Content-Type": "audio/wav"}
    response, _ = await gateway.post("/v1/audio/transcriptions", data=b"RIFF", headers=audio)
    assert (response.status, engine.requests[0][2]) == (200, b"RIFF")


async def test_alias_and_model_are_one_session(gateway: InProcessGateway) -> None:
    for model, history in (("gpt", "new"), ("m", "grown")):
        response, _ = await gateway.post(json=chat(model=model), headers={"x-session-id": "s"})
        assert response.headers["x-dps-history"] == history
