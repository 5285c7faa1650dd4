"""Turns of clients that send a session id: changed histories, several conversations under one id, concurrent turns."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.session.growth import History
from dps_gateway.session.record import MAX_POINTS
from dps_testkit.conversations import SYSTEM, ConversationClient, answer, kind, url, user


@pytest.fixture
def client() -> ConversationClient:
    return ConversationClient("named")


async def test_compaction_changes_the_history(client: ConversationClient) -> None:
    await client.send(SYSTEM, user("a very long story"), answer("..."), user("go on"))
    compacted = await client.send(user("summary of a very long story"), answer("ok"), user("go on"))
    assert (kind(compacted), compacted.delta_tokens) == (History.CHANGED, compacted.prompt_tokens)
    assert compacted.number == 2


async def test_edited_first_message_changes_the_history(client: ConversationClient) -> None:
    await client.send(SYSTEM, user("one"))
    edited = await client.send(SYSTEM, user("won"))
    assert (kind(edited), edited.delta_tokens) == (History.CHANGED, edited.prompt_tokens)


async def test_sub_agents_under_one_id_each_grow_from_their_own_previous_turn(
    client: ConversationClient,
) -> None:
    agents = [[SYSTEM, user(f"agent {number}")] for number in range(3)]
    before = [await client.send(*history) for history in agents]
    for history, last in zip(agents, before, strict=True):
        turn = await client.send(*history, answer("done"), user("next"))
        assert turn.delta_tokens == turn.prompt_tokens - last.prompt_tokens


async def test_slow_duplicate_does_not_overwrite_a_newer_turn(client: ConversationClient) -> None:
    slow = await client.measure(SYSTEM, user("one"))
    await client.send(SYSTEM, user("one"))
    newest = await client.send(SYSTEM, user("one"), answer("a"), user("two"))
    await client.turns.commit(slow, Pool.GREEDY, url(Pool.GREEDY), "")
    third = await client.send(SYSTEM, user("one"), answer("a"), user("two"), answer("b"), user("three"))
    assert (kind(third), third.number) == (History.GROWN, 3)
    assert third.delta_tokens == third.prompt_tokens - newest.prompt_tokens


async def test_same_id_of_two_tenants_is_two_sessions(client: ConversationClient) -> None:
    await client.send(SYSTEM, user("one"))
    other = ConversationClient("named", tenant="other", turns=client.turns)
    assert kind(await other.send(SYSTEM, user("one"))) is History.NEW


async def test_reported_length_corrects_the_prompt_length_but_not_the_growth(
    client: ConversationClient,
) -> None:
    turn = await client.send(SYSTEM, user("one"))
    assert await client.turns.correct(turn, url(Pool.GREEDY), turn.prompt_tokens + 7, cached_tokens=None)
    again = await client.measure(SYSTEM, user("one"), answer("a"), user("two"))
    assert again.prompt_tokens == again.counted_tokens + 7
    assert again.delta_tokens == again.counted_tokens - turn.counted_tokens
    assert again.delta_tokens == again.prompt_tokens - turn.prompt_tokens - 7


@pytest.mark.parametrize("offset", [2000, -200])
async def test_constant_difference_to_the_engines_count_changes_no_delta(
    client: ConversationClient, offset: int
) -> None:
    """Images and other chat templates make the engine's counts differ by a constant."""
    history = [SYSTEM, user("one")]
    previous = await client.send(*history)
    mismatches = [
        await client.turns.correct(previous, url(Pool.GREEDY), previous.counted_tokens + offset, None)
    ]
    for number in range(5):
        history += [answer(f"answer {number}"), user("and then? " * 30)]
        turn = await client.send(*history)
        assert turn.delta_tokens == turn.counted_tokens - previous.counted_tokens
        assert turn.prompt_tokens == turn.counted_tokens + offset
        reported = turn.counted_tokens + offset
        mismatches.append(await client.turns.correct(turn, url(Pool.GREEDY), reported, None))
        previous = turn
    assert mismatches == [True] + [False] * 5


@pytest.mark.parametrize("conversations", [8, 24])
async def test_interleaved_conversations_under_one_id_each_grow(
    client: ConversationClient, conversations: int
) -> None:
    """As under a `prompt_cache_key` that a client uses as a cache bucket."""
    histories = [[SYSTEM, user(f"conversation {number}")] for number in range(conversations)]
    previous = [await client.send(*history) for history in histories]
    for _ in range(3):
        for number, history in enumerate(histories):
            history += [answer("noted"), user("next")]
            turn = await client.send(*history, pool=list(Pool)[number % 2])
            assert kind(turn) is History.GROWN
            assert turn.delta_tokens == turn.prompt_tokens - previous[number].prompt_tokens
            previous[number] = turn


async def test_concurrent_sub_agents_that_share_a_prefix_each_grow(client: ConversationClient) -> None:
    start = [SYSTEM, user("plan")]
    await client.send(*start)
    histories = [[*start, answer("plan"), user(f"step {number}")] for number in range(8)]
    started = [await client.measure(*history) for history in histories]
    for turn in started:
        await client.turns.commit(turn, Pool.GREEDY, url(Pool.GREEDY), "")
    for history, before in zip(histories, started, strict=True):
        turn = await client.send(*history, answer("done"), user("next"))
        assert (kind(turn), turn.delta_tokens) == (
            History.GROWN,
            turn.prompt_tokens - before.prompt_tokens,
        )


async def test_any_number_of_conversations_under_one_id_each_grow(client: ConversationClient) -> None:
    histories = [[SYSTEM, user(f"conversation {number}")] for number in range(2 * MAX_POINTS)]
    previous = [await client.send(*history) for history in histories]
    first = {kind(turn) for turn in previous[1:]}
    assert first == {History.CHANGED}
    for _ in range(2):
        for number, history in enumerate(histories):
            history += [answer("noted"), user("next")]
            turn = await client.send(*history)
            assert kind(turn) is History.GROWN
            assert turn.delta_tokens == turn.prompt_tokens - previous[number].prompt_tokens
            previous[number] = turn


async def test_conversation_beyond_a_full_record_keeps_the_ids_replica(client: ConversationClient) -> None:
    sent = [await client.send(SYSTEM, user(f"conversation {number}")) for number in range(2 * MAX_POINTS)]
    last = await client.send(SYSTEM, user(f"conversation {2 * MAX_POINTS - 1}"), answer("a"), user("next"))
    for turn in (*sent, last):
        assert turn.session.affinity == sent[0].session.id.text
        assert turn.session.client_id == "named"
    assert last.session.id == sent[-1].session.id != sent[0].session.id


async def test_branches_beyond_a_full_record_each_grow(client: ConversationClient) -> None:
    start = [SYSTEM, user("plan")]
    await client.send(*start)
    histories = [[*start, answer("plan"), user(f"step {number}")] for number in range(2 * MAX_POINTS)]
    previous = [await client.send(*history) for history in histories]
    for history, before in zip(histories, previous, strict=True):
        turn = await client.send(*history, answer("done"), user("next"))
        assert (kind(turn), turn.delta_tokens) == (
            History.GROWN,
            turn.prompt_tokens - before.prompt_tokens,
        )


async def test_full_record_of_one_id_does_not_affect_another_id(client: ConversationClient) -> None:
    for number in range(2 * MAX_POINTS):
        await client.send(SYSTEM, user(f"conversation {number}"))
    other = ConversationClient("other", turns=client.turns)
    for number in (0, 2 * MAX_POINTS - 1):
        assert kind(await other.send(SYSTEM, user(f"conversation {number}"), answer("a"), user("b"))) in (
            History.NEW,
            History.CHANGED,
        )


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.integers(0, MAX_POINTS + 20), st.sampled_from(Pool), st.sampled_from(["a", "b", "c"])),
        min_size=50,
        max_size=300,
    )
)
def test_every_turn_after_the_first_of_a_conversation_grows(turns: list[tuple[int, Pool, str]]) -> None:
    """In any order of conversations and on any replicas, and records stay within their bounds."""

    async def play() -> None:
        client = ConversationClient("named")
        known: dict[int, int] = {}
        for number in range(MAX_POINTS):  # the first 50 turns cannot fill a record
            known[-number] = (await client.send(SYSTEM, user(f"{-number}"))).prompt_tokens
        histories = {number: [SYSTEM, user(f"{number}")] for number in known}
        for number, pool, replica in turns:
            history = histories.setdefault(number, [SYSTEM, user(f"{number}")])
            if number in known:
                history += [answer("noted"), user("next")]
            turn = await client.send(*history, pool=pool, replica=f"{pool}-{replica}")
            assert turn.delta_tokens == turn.prompt_tokens - known.get(number, 0)
            assert (kind(turn) is History.GROWN) == (number in known)
            known[number] = turn.prompt_tokens
            record = (await client.turns.store.read(turn.session.scope, turn.session.id)).record
            assert record is not None
            assert len(record.points) <= MAX_POINTS

    asyncio.run(play())
