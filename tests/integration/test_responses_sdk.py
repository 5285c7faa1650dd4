"""The `openai` SDK's Responses API works with a gateway after changing its base URL only."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent

from dps_local.stack import MODEL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


@pytest.fixture
def client(keyed_gateway: tuple[str, str]) -> Iterator[openai.OpenAI]:
    """A client, created as an application does."""
    url, key = keyed_gateway
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as created:
        yield created


async def test_stream_ends_with_the_complete_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="A story", max_output_tokens=8, stream=True))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert last.response.output_text == text
    assert last.response.usage is not None
    assert 0 < last.response.usage.output_tokens <= 8


async def test_id_chosen_by_the_client_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the engine assigns the ids of responses"):
        client.responses.create(model=MODEL, input="Hello!", extra_body={"request_id": "resp_1"})
