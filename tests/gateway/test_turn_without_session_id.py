"""Turns of clients that send no session id: a session is recognised by its history.

The prompts of /v1/completions and /generate have no message boundaries.
"""

from itertools import pairwise
from typing import Any

import pytest

from dps_gateway.prompt.prefixes import ANCHOR_BYTES, MAX_ANCHORS
from dps_gateway.session.growth import History
from tests.gateway.conversations import SYSTEM, ConversationClient, answer, kind, user


@pytest.fixture
def client() -> ConversationClient:
    return ConversationClient(None)


async def test_prompt_that_diverges_from_a_session_starts_a_separate_session(
    client: ConversationClient,
) -> None:
    """The second session starts with a prompt that the first one recorded, so the ΔL of its first turn is 0."""
    start = [SYSTEM, user("hello")]
    first = await client.send(*start)
    await client.send(*start, answer("hi"), user("about cats"))
    same = await client.send(*start)
    assert (same.delta_tokens, same.session.id != first.session.id) == (0, True)
    assert same.number == 1
    parted = await client.send(*start, answer("hi"), user("about dogs"))
    assert parted.delta_tokens == parted.prompt_tokens - first.prompt_tokens


async def test_shared_system_prompt_is_not_a_shared_session(client: ConversationClient) -> None:
    await client.send(SYSTEM, user("about cats"))
    other = await client.send(SYSTEM, user("about dogs"))
    assert (kind(other), other.delta_tokens) == (History.NEW, other.prompt_tokens)


async def test_session_id_from_a_response_can_be_sent_back(client: ConversationClient) -> None:
    first = await client.send(SYSTEM, user("one"))
    named = ConversationClient(first.session.id.text, turns=client.turns)
    second = await named.send(SYSTEM, user("one"), answer("a"), user("two"))
    assert (kind(second), second.session.id) == (History.GROWN, first.session.id)


async def test_fork_keeps_the_affinity_of_its_parent_session(client: ConversationClient) -> None:
    start = [SYSTEM, user("hello"), answer("hi"), user("about cats")]
    await client.send(*start[:2])
    origin = await client.send(*start)
    branch = await client.send(*start[:3], user("about dogs"))
    assert (kind(branch), branch.session.id != origin.session.id) == (History.BRANCHED, True)
    grown = await client.send(*start[:3], user("about dogs"), answer("a"), user("more"))
    again = await client.send(*start[:3], user("about dogs"), answer("a"), user("less"))
    assert grown.session.id == branch.session.id != again.session.id
    affinities = {turn.session.affinity for turn in (origin, branch, grown, again)}
    assert affinities == {origin.session.id.text}


async def test_sessions_with_the_same_system_prompt_are_in_different_hash_slots(
    client: ConversationClient,
) -> None:
    turns = [await client.send(SYSTEM, user(f"subject {number}")) for number in range(20)]
    assert len({turn.session.id.tag for turn in turns}) == 20
    later = [
        await client.send(SYSTEM, user(f"subject {number}"), answer("a"), user("on")) for number in range(20)
    ]
    assert [turn.session.id for turn in later] == [turn.session.id for turn in turns]


async def test_other_tenants_do_not_find_the_session(client: ConversationClient) -> None:
    await client.send(SYSTEM, user("one"))
    other = ConversationClient(None, tenant="other", turns=client.turns)
    assert kind(await other.send(SYSTEM, user("one"))) is History.NEW


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("Once upon a time there was a fox. " * 10, id="text"),
        pytest.param(list(range(100)), id="token ids"),
    ],
)
async def test_each_raw_prompt_grows_from_the_previous_one(client: ConversationClient, start: Any) -> None:
    prompts = [start, start + start[:70], start * 4, start * 20]
    turns = [await client.complete(prompt) for prompt in prompts]
    assert [kind(turn) for turn in turns] == [History.NEW, *[History.GROWN] * 3]
    assert len({turn.session.id for turn in turns}) == 1
    lengths = [turn.prompt_tokens for turn in turns]
    assert [turn.delta_tokens for turn in turns[1:]] == [new - old for old, new in pairwise(lengths)]


async def test_prompts_that_share_an_anchor_but_differ_after_it_are_separate_sessions(
    client: ConversationClient,
) -> None:
    shared = "You are a storyteller. " * 20
    cats, dogs = await client.complete(shared + "cats"), await client.complete(shared + "dogs")
    assert (kind(dogs), dogs.delta_tokens) == (History.NEW, dogs.prompt_tokens)
    assert dogs.session.id != cats.session.id
    later = await client.complete(shared + "dogs" + " bark" * 100)
    assert later.session.id == dogs.session.id
    assert later.delta_tokens == later.prompt_tokens - dogs.prompt_tokens


async def test_growth_beyond_the_anchors_that_are_looked_up_is_a_new_session(
    client: ConversationClient,
) -> None:
    start = list(range(100))
    await client.complete(start)
    assert kind(await client.complete(start + [7] * (ANCHOR_BYTES * MAX_ANCHORS))) is History.NEW
