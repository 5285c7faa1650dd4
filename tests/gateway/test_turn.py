"""A turn from its prompt to its commit: growth, branches, retries, and sessions recognised by their history."""

from collections.abc import Mapping
from typing import Any

import pytest
from multidict import CIMultiDict

from dps_gateway.engine.sglang import SGLang
from dps_gateway.pool import Pool
from dps_gateway.prompt.accounting import Accountant
from dps_gateway.prompt.tokenizer import Tokenizer
from dps_gateway.session.identity import DEFAULT_SESSION_KEYS, Scope, parse_session_key
from dps_gateway.session.mirror import Mirror
from dps_gateway.session.record import History
from dps_gateway.session.store import SessionStore
from dps_gateway.turn import MeasuredTurn, Turns
from dps_local.assets import bundled_tokenizer

SYSTEM = {"role": "system", "content": "You are a helpful assistant with a long list of instructions. " * 20}
KEYS = tuple(map(parse_session_key, DEFAULT_SESSION_KEYS))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def accountant() -> Accountant:
    return Accountant(Tokenizer.load(str(bundled_tokenizer())), SGLang())


class Client:
    """Sends turns of conversations, with a session id or without one."""

    def __init__(
        self, accountant: Accountant, session_id: str | None, tenant: str = "", turns: Turns | None = None
    ) -> None:
        self._accountant = accountant
        self._headers: Mapping[str, str] = CIMultiDict({"x-session-id": session_id} if session_id else {})
        self._scope = Scope.of("model", tenant)
        self.turns = turns or Turns(SessionStore(None, Mirror(1000), 3600), KEYS)

    async def send(self, *messages: dict[str, str], pool: Pool = Pool.GREEDY) -> MeasuredTurn:
        """One turn, answered by `pool`."""
        turn = await self.measure(*messages)
        await self.turns.commit(turn, pool, "")
        return turn

    async def measure(self, *messages: dict[str, str]) -> MeasuredTurn:
        """One turn up to its decision: no engine has begun to answer."""
        body: dict[str, Any] = {"messages": list(messages)}
        return await self.turns.measure(self._scope, self._accountant.chat(body), self._headers, body)


@pytest.fixture(params=["named", None], ids=["with a session id", "without one"])
def client(request: pytest.FixtureRequest, accountant: Accountant) -> Client:
    return Client(accountant, request.param)


def kind(turn: MeasuredTurn) -> History:
    return turn.session.growth.history


async def test_the_first_turn_grows_from_nothing(client: Client) -> None:
    turn = await client.send(SYSTEM, user("one"))
    assert (kind(turn), turn.number, turn.delta_tokens) == (History.NEW, 1, turn.prompt_tokens)


async def test_each_turn_grows_from_the_one_before(client: Client) -> None:
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


async def test_a_turn_that_no_engine_answered_leaves_no_trace(client: Client) -> None:
    abandoned = await client.measure(SYSTEM, user("one"))
    retried = await client.send(SYSTEM, user("one"))
    assert (kind(retried), retried.delta_tokens, retried.number) == (History.NEW, abandoned.prompt_tokens, 1)


async def test_a_retry_of_an_answered_turn_adds_nothing_and_is_the_same_turn(client: Client) -> None:
    await client.send(SYSTEM, user("one"))
    retried = await client.send(SYSTEM, user("one"))
    assert (kind(retried), retried.delta_tokens, retried.number) == (History.GROWN, 0, 1)


async def test_a_regenerated_answer_branches_from_the_turn_before(client: Client) -> None:
    first = await client.send(SYSTEM, user("one"))
    await client.send(SYSTEM, user("one"), answer("a"), user("two"))
    other = await client.send(SYSTEM, user("one"), answer("quite another answer"), user("two"))
    assert (kind(other), other.delta_tokens) == (History.BRANCHED, other.prompt_tokens - first.prompt_tokens)
    assert other.number > first.number


async def test_both_branches_go_on_from_where_they_are(client: Client) -> None:
    start = [SYSTEM, user("one")]
    await client.send(*start)
    left, right = [*start, answer("a"), user("left")], [*start, answer("b"), user("right")]
    at_left, at_right = await client.send(*left), await client.send(*right)
    for branch, last in ((left, at_left), (right, at_right), (left, at_left)):
        turn = await client.measure(*branch, answer("c"), user("on"))
        assert turn.delta_tokens == turn.prompt_tokens - last.prompt_tokens


async def test_pools_are_charged_for_what_they_have_not_seen(client: Client) -> None:
    first = await client.send(SYSTEM, user("one"), pool=Pool.SPECULATIVE)
    history = [SYSTEM, user("one"), answer("a"), user("two")]
    second = await client.send(*history, pool=Pool.GREEDY)
    growth = (await client.measure(*history, answer("b"), user("three"))).session.growth
    length = 1000
    assert growth.uncached_tokens(length, Pool.GREEDY) == length - second.prompt_tokens
    assert growth.uncached_tokens(length, Pool.SPECULATIVE) == length - first.prompt_tokens


class TestWithASessionId:
    @pytest.fixture
    def client(self, accountant: Accountant) -> Client:
        return Client(accountant, "named")

    async def test_compaction_changes_the_history(self, client: Client) -> None:
        await client.send(SYSTEM, user("a very long story"), answer("..."), user("go on"))
        compacted = await client.send(user("summary of a very long story"), answer("ok"), user("go on"))
        assert (kind(compacted), compacted.delta_tokens) == (History.CHANGED, compacted.prompt_tokens)
        assert compacted.number == 2

    async def test_an_edited_first_message_changes_it_too(self, client: Client) -> None:
        await client.send(SYSTEM, user("one"))
        edited = await client.send(SYSTEM, user("won"))
        assert (kind(edited), edited.delta_tokens) == (History.CHANGED, edited.prompt_tokens)

    async def test_sub_agents_under_one_id_each_grow_from_their_own(self, client: Client) -> None:
        agents = [[SYSTEM, user(f"agent {number}")] for number in range(3)]
        before = [await client.send(*history) for history in agents]
        for history, last in zip(agents, before, strict=True):
            turn = await client.send(*history, answer("done"), user("next"))
            assert turn.delta_tokens == turn.prompt_tokens - last.prompt_tokens

    async def test_a_slow_duplicate_of_an_older_turn_does_not_overwrite_a_newer_one(
        self, client: Client
    ) -> None:
        slow = await client.measure(SYSTEM, user("one"))
        await client.send(SYSTEM, user("one"))
        newest = await client.send(SYSTEM, user("one"), answer("a"), user("two"))
        await client.turns.commit(slow, Pool.GREEDY, "")
        third = await client.send(SYSTEM, user("one"), answer("a"), user("two"), answer("b"), user("three"))
        assert (kind(third), third.number) == (History.GROWN, 3)
        assert third.delta_tokens == third.prompt_tokens - newest.prompt_tokens

    async def test_tenants_with_the_same_id_are_two_sessions(
        self, client: Client, accountant: Accountant
    ) -> None:
        await client.send(SYSTEM, user("one"))
        other = Client(accountant, "named", tenant="other", turns=client.turns)
        assert kind(await other.send(SYSTEM, user("one"))) is History.NEW

    async def test_the_engines_word_on_length_is_taken(self, client: Client) -> None:
        turn = await client.send(SYSTEM, user("one"))
        assert await client.turns.correct(turn, Pool.GREEDY, turn.prompt_tokens + 7, cached_tokens=None)
        again = await client.measure(SYSTEM, user("one"), answer("a"), user("two"))
        assert again.delta_tokens == again.prompt_tokens - turn.prompt_tokens - 7

    async def test_an_evicted_cache_is_no_longer_counted_on(self, client: Client) -> None:
        history = [SYSTEM, user("one " * 2000)]
        await client.send(*history)
        other = await client.send(*history, answer("a"), user("left"))
        turn = await client.send(*history, answer("b"), user("right"))
        assert not await client.turns.correct(turn, Pool.GREEDY, turn.prompt_tokens, cached_tokens=0)
        back = await client.measure(*history, answer("a"), user("left"), answer("c"), user("on"))
        assert back.delta_tokens == back.prompt_tokens - other.prompt_tokens
        assert back.session.growth.uncached_tokens(back.prompt_tokens, Pool.GREEDY) == back.prompt_tokens


class TestWithoutASessionId:
    @pytest.fixture
    def client(self, accountant: Accountant) -> Client:
        return Client(accountant, None)

    async def test_conversations_that_begin_alike_part_when_they_differ(self, client: Client) -> None:
        """The engines do hold the shared beginning, so the second one's first turn adds nothing."""
        start = [SYSTEM, user("hello")]
        first = await client.send(*start)
        await client.send(*start, answer("hi"), user("about cats"))
        same = await client.send(*start)
        assert (same.delta_tokens, same.session.id != first.session.id) == (0, True)
        assert same.number == 1
        parted = await client.send(*start, answer("hi"), user("about dogs"))
        assert parted.delta_tokens == parted.prompt_tokens - first.prompt_tokens

    async def test_a_shared_system_prompt_alone_makes_no_session(self, client: Client) -> None:
        await client.send(SYSTEM, user("about cats"))
        other = await client.send(SYSTEM, user("about dogs"))
        assert (kind(other), other.delta_tokens) == (History.NEW, other.prompt_tokens)

    async def test_many_conversations_with_one_beginning_each_keep_their_place(self, client: Client) -> None:
        start = [SYSTEM, user("hello")]
        lasts = {}
        for number in range(12):
            lasts[number] = await client.send(*start, answer("hi"), user(f"subject {number}"))
        for number, last in lasts.items():
            turn = await client.send(
                *start, answer("hi"), user(f"subject {number}"), answer("a"), user("more")
            )
            assert turn.delta_tokens == turn.prompt_tokens - last.prompt_tokens

    async def test_the_id_that_is_handed_out_may_be_sent_back(
        self, client: Client, accountant: Accountant
    ) -> None:
        first = await client.send(SYSTEM, user("one"))
        named = Client(accountant, first.session.id.text, turns=client.turns)
        second = await named.send(SYSTEM, user("one"), answer("a"), user("two"))
        assert (kind(second), second.session.id) == (History.GROWN, first.session.id)

    async def test_another_tenant_does_not_find_the_session(
        self, client: Client, accountant: Accountant
    ) -> None:
        await client.send(SYSTEM, user("one"))
        other = Client(accountant, None, tenant="other", turns=client.turns)
        assert kind(await other.send(SYSTEM, user("one"))) is History.NEW
