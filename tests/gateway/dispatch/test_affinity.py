"""The replica that serves a session."""

import pytest

from dps_gateway.api.endpoints import ENDPOINTS
from tests.gateway.dispatch.gateway_with_pools import Start, engines

PROMPTS = {"input": "hello", "prompt": "hello", "text": "hello"}
"""The fields for the prompt of all endpoints but those with `messages`."""


@pytest.mark.parametrize("path", [route.path for route in ENDPOINTS])
async def test_sessions_use_several_replicas_and_each_keeps_its_own(start: Start, path: str) -> None:
    replicas = engines(3)
    gateway = await start(replicas, engines(1))
    for number in range(12):
        for _ in range(2):
            assert (await gateway.post(number, None, path, **PROMPTS)).status == 200
        assert [replica.requests % 2 for replica in replicas] == [0, 0, 0]
    assert sum(replica.requests > 0 for replica in replicas) > 1


async def test_conversations_under_one_id_use_several_replicas_and_each_keeps_its_own(start: Start) -> None:
    """OpenAI's prompt_cache_key is often one value for a whole application."""
    replicas = engines(4)
    gateway = await start(replicas, engines(1))
    for number in range(20):
        first = [{"role": "user", "content": f"conversation {number}"}]
        await gateway.post(0, messages=first)
        grown = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]
        response = await gateway.post(0, messages=grown)
        assert response.headers["x-dps-history"] == "grown"
        assert [replica.requests % 2 for replica in replicas] == [0, 0, 0, 0]
    assert sum(replica.requests > 0 for replica in replicas) > 1
