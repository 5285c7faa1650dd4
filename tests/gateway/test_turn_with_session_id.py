"""Turns of clients that send a session id: changed histories, several conversations under one id, concurrent turns."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dps_gateway.pool import Pool
from dps_gateway.session.growth import History
from dps_gateway.session.record import MAX_POINTS
from tests.gateway.conversations import SYSTEM, ConversationClient, answer, kind, url, user


@pytest.fixture
def client() -> ConversationClient:
    return ConversationClient("named")


@pytest.mark.parametrize(
    "changed",
    [
        [user("summary of a very long story"), answer("ok"), user("go on")],
        [SYSTEM, user("a very short story"), answer("..."), user("go on")],
    ],
    ids=["compaction", "edited first message"],
)
async def test_prompt_that_does_not_begin_with_an_earlier_one_changes_the_history(
    client: ConversationClient, changed: list[dict[str, str]]
) -> None:
    await client.send(SYSTEM, user("a very long story"), answer("..."), user("go on"))
    turn = await client.send(*changed)
    assert (kind(turn), turn.delta_tokens, turn.number) == (History.CHANGED, turn.prompt_tokens, 2)


def long_history(changed: int | None) -> list[dict[str, str]]:
    """A system prompt and 18 messages, of which the one with the index `changed` is different."""
    history = [SYSTEM, *([user("question"), answer("answer")] * 9), user("last")]
    return [
        each | {"content": "different"} if number == changed else each for number, each in enumerate(history)
    ]


@pytest.mark.parametrize(
    ("changed", "message", "role"),
    [(0, 0, "system"), (1, 1, "user"), (2, 2, "assistant"), (15, 15, "user"), (16, 16, None), (18, 16, None)],
)
async def test_changed_history_says_which_message_differs(
    client: ConversationClient, changed: int, message: int, role: str | None
) -> None:
    assert (await client.send(*long_history(None))).difference is None
    turn = await client.send(*long_history(changed))
    assert turn.difference is not None
    assert (turn.difference.message, turn.difference.role) == (message, role)
    assert turn.prompt.data[turn.difference.byte :].startswith(b"<|im_start|>")
    grown = await client.send(*long_history(changed), answer("a"), user("b"))
    assert (kind(grown), grown.difference) == (History.GROWN, None)


async def test_difference_of_a_raw_prompt_is_unknown(client: ConversationClient) -> None:
    await client.complete("one prompt")
    turn = await client.complete("another prompt")
    assert (kind(turn), turn.difference) == (History.CHANGED, None)


async def test_slow_duplicate_does_not_overwrite_a_newer_turn(client: ConversationClient) -> None:
    slow = await client.measure(SYSTEM, user("one"))
    await client.send(SYSTEM, user("one"))
    newest = await client.send(SYSTEM, user("one"), answer("a"), user("two"))
    await client.turns.commit(slow, Pool.GREEDY, url(Pool.GREEDY), "")
    third = await client.send(SYSTEM, user("one"), answer("a"), user("two"), answer("b"), user("three"))
    assert (kind(third), third.number) == (History.GROWN, 3)
    assert third.delta_tokens == third.prompt_tokens - newest.prompt_tokens


@pytest.mark.parametrize("offset", [2000, -200])
async def test_constant_difference_to_the_engines_count_changes_no_delta(
    client: ConversationClient, offset: int
) -> None:
    """Images and other chat templates make the engine's counts differ by a constant."""
    history = [SYSTEM, user("one")]
    previous = await client.send(*history)
    mismatches = [await client.report(previous, url(Pool.GREEDY), previous.point.counted + offset)]
    for number in range(5):
        history += [answer(f"answer {number}"), user("and then? " * 30)]
        turn = await client.send(*history)
        assert turn.delta_tokens == turn.point.counted - previous.point.counted
        assert turn.prompt_tokens == turn.point.counted + offset
        reported = turn.point.counted + offset
        mismatches.append(await client.report(turn, url(Pool.GREEDY), reported))
        previous = turn
    assert mismatches == [True] + [False] * 5


async def test_conversation_beyond_a_full_record_keeps_the_ids_replica(client: ConversationClient) -> None:
    sent = [await client.send(SYSTEM, user(f"conversation {number}")) for number in range(2 * MAX_POINTS)]
    last = await client.send(SYSTEM, user(f"conversation {2 * MAX_POINTS - 1}"), answer("a"), user("next"))
    for turn in (*sent, last):
        assert turn.session.affinity == sent[0].session.id.text
        assert turn.session.client_id == "named"
    assert last.session.id == sent[-1].session.id != sent[0].session.id


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
