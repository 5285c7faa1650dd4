"""Models with the harmony format (gpt-oss): their chats are turns of sessions, requests to /v1/responses are not."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dps_local.assets import bundled_tokenizer
from dps_local.stack import MODEL
from dps_testkit.data_plane import CHAT, chat, posted
from dps_testkit.processes import Engine, Gateway, LocalProcesses

pytestmark = pytest.mark.asyncio(loop_scope="module")

HARMONY = (
    "{% for message in messages %}"
    "<|start|>{{ message.role }}<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{% endfor %}<|start|>assistant"
)
RESPONSES = "/v1/responses"


def response(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", "max_output_tokens": 4, **fields}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    tmp_path_factory: pytest.TempPathFactory, engines: tuple[Engine, Engine]
) -> AsyncIterator[Gateway]:
    """A gateway of a model with the harmony format."""
    folder = tmp_path_factory.mktemp("harmony")
    tokenizer = Path(shutil.copytree(bundled_tokenizer(), folder / "tokenizer"))
    settings = tokenizer / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": HARMONY}))
    async with LocalProcesses(folder, tokenizer) as processes:
        yield await processes.start_gateway([engines[0]], [engines[1]])


@pytest.mark.parametrize(
    ("path", "body", "history"),
    [
        (CHAT, chat(), "new"),
        (RESPONSES, response(), "stateless"),
        (RESPONSES, response(stream=True), "stateless"),
        (RESPONSES, response(input=[{"role": "user", "content": "hello"}]), "stateless"),
    ],
    ids=["chat", "response", "stream", "list of messages"],
)
async def test_requests_to_the_responses_api_are_stateless(
    gateway: Gateway, path: str, body: dict[str, Any], history: str
) -> None:
    async with posted(gateway.url + path, body, **{"x-session-id": path}) as answer:
        content = await answer.read()
    assert (answer.status, answer.headers["x-dps-history"]) == (200, history)
    assert ("x-dps-session" in answer.headers) is (history == "new")
    assert ("x-dps-prompt-tokens" in answer.headers) is (history == "new")
    assert b'"usage"' in content
