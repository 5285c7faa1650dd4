"""The growth of each turn of a conversation, with a session id and without one."""

from typing import Any

import pytest

from dps_gateway.pool import Pool
from dps_gateway.session.growth import History
from dps_gateway.session.record import StoredResponse
from tests.gateway.conversations import SYSTEM, ConversationClient, answer, kind, renderer, url, user


@pytest.fixture(params=["named", None], ids=["with a session id", "without one"])
def client(request: pytest.FixtureRequest) -> ConversationClient:
    return ConversationClient(request.param)


async def test_each_turn_grows_from_the_previous_one(client: ConversationClient) -> None:
    history = [SYSTEM, user("one")]
    first = await client.send(*history)
    history += [answer("a"), user("two")]
    second = await client.send(*history)
    history += [answer("b"), user("three")]
    third = await client.send(*history)
    assert [kind(second), kind(third)] == [History.GROWN, History.GROWN]
    assert second.delta_tokens == second.prompt_tokens - first.prompt_tokens
    assert third.delta_tokens == third.prompt_tokens - second.prompt_tokens
    assert [first.number, second.number, third.number] == [1, 2, 3]
    assert first.session.id == third.session.id


async def test_unanswered_turn_is_not_recorded(client: ConversationClient) -> None:
    abandoned = await client.measure(SYSTEM, user("one"))
    retried = await client.send(SYSTEM, user("one"))
    assert (kind(retried), retried.delta_tokens, retried.number) == (History.NEW, abandoned.prompt_tokens, 1)


async def test_retry_of_same_turn_has_zero_delta(client: ConversationClient) -> None:
    await client.send(SYSTEM, user("one"))
    retried = await client.send(SYSTEM, user("one"))
    assert (kind(retried), retried.delta_tokens, retried.number) == (History.GROWN, 0, 1)


async def test_regenerated_answer_branches_from_the_previous_turn(client: ConversationClient) -> None:
    first = await client.send(SYSTEM, user("one"))
    await client.send(SYSTEM, user("one"), answer("a"), user("two"))
    other = await client.send(SYSTEM, user("one"), answer("quite another answer"), user("two"))
    assert (kind(other), other.delta_tokens) == (History.BRANCHED, other.prompt_tokens - first.prompt_tokens)
    assert other.number > first.number


async def test_both_branches_continue_from_their_own_last_turn(client: ConversationClient) -> None:
    start = [SYSTEM, user("one")]
    await client.send(*start)
    left, right = [*start, answer("a"), user("left")], [*start, answer("b"), user("right")]
    at_left, at_right = await client.send(*left), await client.send(*right)
    for branch, last in ((left, at_left), (right, at_right), (left, at_left)):
        turn = await client.measure(*branch, answer("c"), user("on"))
        assert turn.delta_tokens == turn.prompt_tokens - last.prompt_tokens


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("model", "m:lora-a", "m:lora-b"),
        ("lora_path", "a", "b"),
        ("cache_salt", "a", "b"),
        ("extra_key", "a", None),
        ("image_data", "http://images/cat.png", "http://images/dog.png"),
        ("audio_data", ["http://audio/a.wav"], ["http://audio/b.wav"]),
        ("video_data", "http://videos/a.mp4", None),
    ],
)
async def test_growth_is_measured_separately_for_separate_kv_caches(
    client: ConversationClient, field: str, one: Any, other: Any
) -> None:
    history = [SYSTEM, user("one")]
    first = await client.send(*history, **{field: one})
    elsewhere = await client.send(*history, **{field: other})
    assert elsewhere.delta_tokens == elsewhere.prompt_tokens
    history += [answer("a"), user("two")]
    for value in (one, other):
        turn = await client.send(*history, **{field: value})
        assert (kind(turn), turn.delta_tokens) == (History.GROWN, turn.prompt_tokens - first.prompt_tokens)


@pytest.mark.parametrize(
    ("part", "one", "other"),
    [
        ("image_url", {"url": "http://images/cat.png"}, {"url": "http://images/dog.png"}),
        ("video_url", {"url": "http://videos/cat.mp4"}, {"url": "http://videos/dog.mp4"}),
        ("input_audio", {"data": "AAAA", "format": "wav"}, {"data": "BBBB", "format": "wav"}),
    ],
)
async def test_media_are_part_of_the_history(
    client: ConversationClient, part: str, one: dict[str, str], other: dict[str, str]
) -> None:
    def message(media: dict[str, str]) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": part, part: media}]}

    start = [SYSTEM, user("hello")]
    first = await client.send(*start)
    with_media = [*start, answer("hi"), message(one)]
    second = await client.send(*with_media)
    assert (kind(second), second.delta_tokens) == (History.GROWN, second.prompt_tokens - first.prompt_tokens)
    third = await client.send(*with_media, answer("a cat"), user("what colour?"))
    assert (kind(third), third.delta_tokens) == (History.GROWN, third.prompt_tokens - second.prompt_tokens)
    changed = await client.send(*start, answer("hi"), message(other), answer("a cat"), user("?"))
    delta = changed.prompt_tokens - first.prompt_tokens
    assert (kind(changed), changed.delta_tokens) == (History.BRANCHED, delta)


@pytest.mark.parametrize("difference", [0, 100, -20])
async def test_turn_that_continues_a_stored_response_grows_from_its_length(difference: int) -> None:
    """The engine's counts differ from the gateway's by `difference`, and the stored length is the engine's."""
    client = ConversationClient(None)
    first = await client.respond("How is it in Oslo?")
    length = first.prompt_tokens + difference
    await client.report(first, url(Pool.GREEDY), length)
    answered = length + 9
    stored = StoredResponse(
        Pool.GREEDY, url(Pool.GREEDY), first.session.id.text, first.prompt.digest, answered
    )
    second = await client.respond("And in Bern?", stored)
    added, _ = renderer().responses({"input": "And in Bern?", "previous_response_id": "resp"}).count(None)
    assert (kind(second), second.session.id, second.number) == (History.GROWN, first.session.id, 2)
    assert (second.prompt_tokens, second.delta_tokens) == (answered + added, 9 + added)
    again = await client.respond("And in Bern?", stored)
    assert (again.prompt_tokens, again.delta_tokens, again.number) == (second.prompt_tokens, 0, 2)
