"""A turn from its prompt to its commit: growth, branches, retries, and sessions identified by their history."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from multidict import CIMultiDict

from dps_gateway.engine.sglang import SGLang
from dps_gateway.pool import Pool
from dps_gateway.prompt.accounting import Accountant
from dps_gateway.prompt.boundaries import ANCHOR_BYTES, MAX_ANCHORS
from dps_gateway.prompt_tokens import PromptTokens
from dps_gateway.replica_id import replica_id
from dps_gateway.session.growth import History
from dps_gateway.session.identity import DEFAULT_SESSION_KEYS, Scope, parse_session_key
from dps_gateway.session.mirror import Mirror
from dps_gateway.session.store import SessionStore
from dps_gateway.turn import MeasuredTurn, Turns, policy_input
from dps_gateway.upstream.admission import Admission
from dps_gateway.upstream.pool import EnginePool
from dps_testkit.tokenizers import shared_tokenizer

SYSTEM = {"role": "system", "content": "You are a helpful assistant with a long list of instructions. " * 20}
KEYS = tuple(map(parse_session_key, DEFAULT_SESSION_KEYS))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def url(pool: Pool) -> str:
    """The base URL of the only replica of a pool."""
    return f"http://{pool}"


def tokens(turn: MeasuredTurn, pool: Pool) -> PromptTokens:
    return turn.cached.tokens(replica_id(url(pool)))


@pytest.fixture(scope="module")
def accountant() -> Accountant:
    return Accountant(shared_tokenizer(), SGLang())


class Client:
    """Sends turns of conversations, with a session id or without one."""

    def __init__(
        self, accountant: Accountant, session_id: str | None, tenant: str = "", turns: Turns | None = None
    ) -> None:
        self._accountant = accountant
        self._headers: Mapping[str, str] = CIMultiDict({"x-session-id": session_id} if session_id else {})
        self._scope = Scope.of("model", tenant)
        self.turns = turns or Turns(SessionStore(None, Mirror(1000), 3600), KEYS, SGLang.cache_fields)

    async def send(
        self, *messages: dict[str, Any], pool: Pool = Pool.GREEDY, replica: str | None = None, **fields: Any
    ) -> MeasuredTurn:
        """One turn, answered by a replica of `pool`; `fields` are the request's other fields."""
        turn = await self.measure(*messages, **fields)
        await self.turns.commit(turn, pool, replica or url(pool), "")
        return turn

    async def measure(self, *messages: dict[str, Any], **fields: Any) -> MeasuredTurn:
        """One turn up to its decision: no engine has begun to answer."""
        body: dict[str, Any] = {"messages": list(messages), **fields}
        return await self.turns.measure(self._scope, self._accountant.chat(body), self._headers, body)

    async def complete(self, prompt: str | list[int]) -> MeasuredTurn:
        """One turn of a raw completion, answered by the greedy pool."""
        turn = await self.turns.measure(self._scope, self._accountant.text(prompt), self._headers, {})
        await self.turns.commit(turn, Pool.GREEDY, url(Pool.GREEDY), "")
        return turn


@pytest.fixture(params=["named", None], ids=["with a session id", "without one"])
def client(request: pytest.FixtureRequest, accountant: Accountant) -> Client:
    return Client(accountant, request.param)


def kind(turn: MeasuredTurn) -> History:
    return turn.session.growth.history


async def test_first_turn_is_new(client: Client) -> None:
    turn = await client.send(SYSTEM, user("one"))
    assert (kind(turn), turn.number, turn.delta_tokens) == (History.NEW, 1, turn.prompt_tokens)


async def test_each_turn_grows_from_the_previous_one(client: Client) -> None:
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


async def test_unanswered_turn_is_not_recorded(client: Client) -> None:
    abandoned = await client.measure(SYSTEM, user("one"))
    retried = await client.send(SYSTEM, user("one"))
    assert (kind(retried), retried.delta_tokens, retried.number) == (History.NEW, abandoned.prompt_tokens, 1)


async def test_retry_of_same_turn_has_zero_delta(client: Client) -> None:
    await client.send(SYSTEM, user("one"))
    retried = await client.send(SYSTEM, user("one"))
    assert (kind(retried), retried.delta_tokens, retried.number) == (History.GROWN, 0, 1)


async def test_regenerated_answer_branches_from_the_previous_turn(client: Client) -> None:
    first = await client.send(SYSTEM, user("one"))
    await client.send(SYSTEM, user("one"), answer("a"), user("two"))
    other = await client.send(SYSTEM, user("one"), answer("quite another answer"), user("two"))
    assert (kind(other), other.delta_tokens) == (History.BRANCHED, other.prompt_tokens - first.prompt_tokens)
    assert other.number > first.number


async def test_both_branches_continue_from_their_own_last_turn(client: Client) -> None:
    start = [SYSTEM, user("one")]
    await client.send(*start)
    left, right = [*start, answer("a"), user("left")], [*start, answer("b"), user("right")]
    at_left, at_right = await client.send(*left), await client.send(*right)
    for branch, last in ((left, at_left), (right, at_right), (left, at_left)):
        turn = await client.measure(*branch, answer("c"), user("on"))
        assert turn.delta_tokens == turn.prompt_tokens - last.prompt_tokens


async def test_uncached_tokens_depend_on_the_turns_that_each_pool_answered(client: Client) -> None:
    first = await client.send(SYSTEM, user("one"), pool=Pool.SPECULATIVE)
    history = [SYSTEM, user("one"), answer("a"), user("two")]
    second = await client.send(*history, pool=Pool.GREEDY)
    turn = await client.measure(*history, answer("b"), user("three"))
    assert tokens(turn, Pool.GREEDY).held == second.prompt_tokens
    assert tokens(turn, Pool.SPECULATIVE).held == first.prompt_tokens


async def test_turn_goes_to_the_replica_that_holds_the_longest_prefix(client: Client) -> None:
    """Whichever replica a session without history prefers: the first turns are answered by each of them once."""
    urls = [f"http://greedy-{number}" for number in range(3)]
    pools = ready_pools()
    pools[Pool.GREEDY].set_endpoints(urls)
    for replica in urls:
        history = [SYSTEM, user(f"to {replica}")]
        first = await client.send(*history, replica=replica)
        turn = await client.measure(*history, answer("a"), user("two"))
        view = policy_input(turn, pools).pools[Pool.GREEDY]
        new = turn.prompt_tokens - first.prompt_tokens
        assert view.prompt == PromptTokens(held=first.prompt_tokens, fetchable=0, prefill=new)


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        ("model", "m:lora-a", "m:lora-b"),
        ("lora_path", "a", "b"),
        ("cache_salt", "a", "b"),
        ("extra_key", "a", None),
    ],
)
async def test_growth_is_measured_separately_for_separate_kv_caches(
    client: Client, field: str, one: Any, other: Any
) -> None:
    history = [SYSTEM, user("one")]
    first = await client.send(*history, **{field: one})
    elsewhere = await client.send(*history, **{field: other})
    assert elsewhere.delta_tokens == elsewhere.prompt_tokens
    history += [answer("a"), user("two")]
    for value in (one, other):
        turn = await client.send(*history, **{field: value})
        assert (kind(turn), turn.delta_tokens) == (History.GROWN, turn.prompt_tokens - first.prompt_tokens)


def picture(url: str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}],
    }


async def test_image_is_part_of_the_history(client: Client) -> None:
    start = [SYSTEM, user("hello")]
    first = await client.send(*start)
    with_image = [*start, answer("hi"), picture("http://images/cat.png")]
    second = await client.send(*with_image)
    assert (kind(second), second.delta_tokens) == (History.GROWN, second.prompt_tokens - first.prompt_tokens)
    third = await client.send(*with_image, answer("a cat"), user("what colour?"))
    assert (kind(third), third.delta_tokens) == (History.GROWN, third.prompt_tokens - second.prompt_tokens)
    other = await client.send(
        *start, answer("hi"), picture("http://images/dog.png"), answer("a cat"), user("?")
    )
    assert (kind(other), other.delta_tokens) == (History.BRANCHED, other.prompt_tokens - first.prompt_tokens)


class TestWithASessionId:
    @pytest.fixture
    def client(self, accountant: Accountant) -> Client:
        return Client(accountant, "named")

    async def test_compaction_changes_the_history(self, client: Client) -> None:
        await client.send(SYSTEM, user("a very long story"), answer("..."), user("go on"))
        compacted = await client.send(user("summary of a very long story"), answer("ok"), user("go on"))
        assert (kind(compacted), compacted.delta_tokens) == (History.CHANGED, compacted.prompt_tokens)
        assert compacted.number == 2

    async def test_edited_first_message_changes_the_history(self, client: Client) -> None:
        await client.send(SYSTEM, user("one"))
        edited = await client.send(SYSTEM, user("won"))
        assert (kind(edited), edited.delta_tokens) == (History.CHANGED, edited.prompt_tokens)

    async def test_sub_agents_under_one_id_each_grow_from_their_own_previous_turn(
        self, client: Client
    ) -> None:
        agents = [[SYSTEM, user(f"agent {number}")] for number in range(3)]
        before = [await client.send(*history) for history in agents]
        for history, last in zip(agents, before, strict=True):
            turn = await client.send(*history, answer("done"), user("next"))
            assert turn.delta_tokens == turn.prompt_tokens - last.prompt_tokens

    async def test_slow_duplicate_does_not_overwrite_a_newer_turn(self, client: Client) -> None:
        slow = await client.measure(SYSTEM, user("one"))
        await client.send(SYSTEM, user("one"))
        newest = await client.send(SYSTEM, user("one"), answer("a"), user("two"))
        await client.turns.commit(slow, Pool.GREEDY, url(Pool.GREEDY), "")
        third = await client.send(SYSTEM, user("one"), answer("a"), user("two"), answer("b"), user("three"))
        assert (kind(third), third.number) == (History.GROWN, 3)
        assert third.delta_tokens == third.prompt_tokens - newest.prompt_tokens

    async def test_same_id_of_two_tenants_is_two_sessions(
        self, client: Client, accountant: Accountant
    ) -> None:
        await client.send(SYSTEM, user("one"))
        other = Client(accountant, "named", tenant="other", turns=client.turns)
        assert kind(await other.send(SYSTEM, user("one"))) is History.NEW

    async def test_reported_length_corrects_the_prompt_length_but_not_the_growth(
        self, client: Client
    ) -> None:
        turn = await client.send(SYSTEM, user("one"))
        assert await client.turns.correct(turn, url(Pool.GREEDY), turn.prompt_tokens + 7, cached_tokens=None)
        again = await client.measure(SYSTEM, user("one"), answer("a"), user("two"))
        assert again.prompt_tokens == again.counted_tokens + 7
        assert again.delta_tokens == again.counted_tokens - turn.counted_tokens
        assert again.delta_tokens == again.prompt_tokens - turn.prompt_tokens - 7

    @pytest.mark.parametrize("offset", [2000, -200])
    async def test_constant_difference_to_the_engines_count_changes_no_delta(
        self, client: Client, offset: int
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
        self, client: Client, conversations: int
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

    async def test_concurrent_sub_agents_that_share_a_prefix_each_grow(self, client: Client) -> None:
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

    async def test_eviction_on_one_replica_does_not_affect_the_others(self, client: Client) -> None:
        history = [SYSTEM, user("one " * 2000)]
        first = await client.send(*history, replica="http://one")
        turn = await client.send(*history, answer("a"), user("left"), replica="http://two")
        assert not await client.turns.correct(turn, "http://two", turn.prompt_tokens, cached_tokens=0)
        again = await client.send(*history, answer("b"), user("right"), replica="http://two")
        assert not await client.turns.correct(again, "http://two", again.prompt_tokens, cached_tokens=0)
        back = await client.measure(*history, answer("c"), user("on"))
        assert back.cached.held == {replica_id("http://one"): first.prompt_tokens}

    async def test_evicted_prefix_is_no_longer_counted_as_cached(self, client: Client) -> None:
        history = [SYSTEM, user("one " * 2000)]
        await client.send(*history)
        other = await client.send(*history, answer("a"), user("left"))
        turn = await client.send(*history, answer("b"), user("right"))
        assert not await client.turns.correct(turn, url(Pool.GREEDY), turn.prompt_tokens, cached_tokens=0)
        back = await client.measure(*history, answer("a"), user("left"), answer("c"), user("on"))
        assert back.delta_tokens == back.prompt_tokens - other.prompt_tokens
        assert tokens(back, Pool.GREEDY).prefill == back.prompt_tokens

    @pytest.mark.parametrize(
        ("cached_tokens", "fetched_tokens", "held_in_memory", "shared"),
        [
            pytest.param(4_000, 0, True, True, id="held"),
            pytest.param(4_000, 4_000, False, True, id="evicted from memory, and fetched"),
            pytest.param(0, 0, False, False, id="neither held nor fetched"),
            pytest.param(0, None, False, True, id="evicted, and the engine does not report fetches"),
            pytest.param(None, None, True, True, id="the engine reports nothing"),
        ],
    )
    async def test_reported_sources_are_recorded(
        self,
        accountant: Accountant,
        cached_tokens: int | None,
        fetched_tokens: int | None,
        held_in_memory: bool,
        shared: bool,
    ) -> None:
        """The session's second turn is answered by the same pool. Its prompt is more than 2,000 tokens long."""
        client = sharing(accountant)
        history = [SYSTEM, user("one " * 2000)]
        first = await client.send(*history)
        turn = await client.send(*history, answer("a"), user("right"))
        length = turn.prompt_tokens
        assert not await client.turns.correct(turn, url(Pool.GREEDY), length, cached_tokens, fetched_tokens)
        branch = await client.measure(*history, answer("b"), user("left"))
        new = branch.prompt_tokens - first.prompt_tokens
        held = first.prompt_tokens if held_in_memory else 0
        fetchable = first.prompt_tokens - held if shared else 0
        assert tokens(branch, Pool.GREEDY) == PromptTokens(
            held, fetchable, first.prompt_tokens - held - fetchable + new
        )
        assert tokens(branch, Pool.SPECULATIVE).fetchable == (first.prompt_tokens if shared else 0)


class TestWithoutASessionId:
    @pytest.fixture
    def client(self, accountant: Accountant) -> Client:
        return Client(accountant, None)

    async def test_prompt_that_diverges_from_a_session_starts_a_separate_session(
        self, client: Client
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

    async def test_shared_system_prompt_is_not_a_shared_session(self, client: Client) -> None:
        await client.send(SYSTEM, user("about cats"))
        other = await client.send(SYSTEM, user("about dogs"))
        assert (kind(other), other.delta_tokens) == (History.NEW, other.prompt_tokens)

    async def test_many_conversations_with_the_same_beginning_are_distinguished(self, client: Client) -> None:
        start = [SYSTEM, user("hello")]
        lasts = {}
        for number in range(12):
            lasts[number] = await client.send(*start, answer("hi"), user(f"subject {number}"))
        for number, last in lasts.items():
            turn = await client.send(
                *start, answer("hi"), user(f"subject {number}"), answer("a"), user("more")
            )
            assert turn.delta_tokens == turn.prompt_tokens - last.prompt_tokens

    async def test_session_id_from_a_response_can_be_sent_back(
        self, client: Client, accountant: Accountant
    ) -> None:
        first = await client.send(SYSTEM, user("one"))
        named = Client(accountant, first.session.id.text, turns=client.turns)
        second = await named.send(SYSTEM, user("one"), answer("a"), user("two"))
        assert (kind(second), second.session.id) == (History.GROWN, first.session.id)

    async def test_fork_keeps_the_affinity_of_its_parent_session(self, client: Client) -> None:
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
        self, client: Client
    ) -> None:
        turns = [await client.send(SYSTEM, user(f"subject {number}")) for number in range(20)]
        assert len({turn.session.id.tag for turn in turns}) == 20
        later = [
            await client.send(SYSTEM, user(f"subject {number}"), answer("a"), user("on"))
            for number in range(20)
        ]
        assert [turn.session.id for turn in later] == [turn.session.id for turn in turns]

    async def test_other_tenants_do_not_find_the_session(
        self, client: Client, accountant: Accountant
    ) -> None:
        await client.send(SYSTEM, user("one"))
        other = Client(accountant, None, tenant="other", turns=client.turns)
        assert kind(await other.send(SYSTEM, user("one"))) is History.NEW


class TestRawPromptsWithoutASessionId:
    """Prompts of /v1/completions and /generate have no message boundaries."""

    @pytest.fixture
    def client(self, accountant: Accountant) -> Client:
        return Client(accountant, None)

    @pytest.mark.parametrize(
        "start",
        [
            pytest.param("Once upon a time there was a fox. " * 10, id="text"),
            pytest.param(list(range(100)), id="token ids"),
        ],
    )
    async def test_each_prompt_grows_from_the_previous_one(self, client: Client, start: Any) -> None:
        prompts = [start, start + start[:70], start * 4, start * 20]
        turns = [await client.complete(prompt) for prompt in prompts]
        assert [kind(turn) for turn in turns] == [History.NEW, *[History.GROWN] * 3]
        assert len({turn.session.id for turn in turns}) == 1
        lengths = [turn.prompt_tokens for turn in turns]
        assert [turn.delta_tokens for turn in turns[1:]] == [new - old for old, new in pairwise(lengths)]

    async def test_prompts_that_share_an_anchor_but_differ_after_it_are_separate_sessions(
        self, client: Client
    ) -> None:
        shared = "You are a storyteller. " * 20
        cats, dogs = await client.complete(shared + "cats"), await client.complete(shared + "dogs")
        assert (kind(dogs), dogs.delta_tokens) == (History.NEW, dogs.prompt_tokens)
        assert dogs.session.id != cats.session.id
        later = await client.complete(shared + "dogs" + " bark" * 100)
        assert later.session.id == dogs.session.id
        assert later.delta_tokens == later.prompt_tokens - dogs.prompt_tokens

    async def test_growth_beyond_the_anchors_that_are_looked_up_is_a_new_session(
        self, client: Client
    ) -> None:
        start = list(range(100))
        await client.complete(start)
        assert kind(await client.complete(start + [7] * (ANCHOR_BYTES * MAX_ANCHORS))) is History.NEW


def sharing(accountant: Accountant, common: bool = True) -> Client:
    """A client of a gateway whose pools have a prefix cache in common."""
    store = SessionStore(None, Mirror(1000), 3600)
    return Client(
        accountant, "named", turns=Turns(store, KEYS, SGLang.cache_fields, common_prefix_cache=common)
    )


@pytest.mark.parametrize("common", [False, True])
async def test_policy_receives_what_a_pool_can_fetch_only_if_the_pools_share_a_prefix_cache(
    accountant: Accountant, common: bool
) -> None:
    client = sharing(accountant, common)
    first = await client.send(SYSTEM, user("one"), pool=Pool.GREEDY)
    assert first.prompt_tokens >= 256
    turn = await client.measure(SYSTEM, user("one"), answer("two"), user("three"))
    new = turn.prompt_tokens - first.prompt_tokens
    moved = PromptTokens(0, first.prompt_tokens, new) if common else PromptTokens(0, 0, turn.prompt_tokens)
    views = policy_input(turn, ready_pools()).pools
    assert {pool: view.prompt for pool, view in views.items()} == {
        Pool.SPECULATIVE: moved,
        Pool.GREEDY: PromptTokens(first.prompt_tokens, 0, new),
    }


async def test_nothing_is_fetchable_once_the_common_prefix_cache_is_disabled(accountant: Accountant) -> None:
    client = sharing(accountant)
    await client.send(SYSTEM, user("one"), pool=Pool.GREEDY)
    client.turns.configure(KEYS, 3600, common_prefix_cache=False)
    turn = await client.measure(SYSTEM, user("one"), answer("two"), user("three"))
    assert tokens(turn, Pool.SPECULATIVE) == PromptTokens(0, 0, turn.prompt_tokens)


def ready_pools() -> dict[Pool, EnginePool]:
    pools = {pool: EnginePool(pool, 8, Admission(8)) for pool in Pool}
    for pool, engines in pools.items():
        engines.set_endpoints([url(pool)])
    return pools


async def test_policy_receives_only_pools_with_a_ready_replica(client: Client) -> None:
    pools = ready_pools()
    for replica in pools[Pool.SPECULATIVE].replicas.values():
        pools[Pool.SPECULATIVE].mark_unavailable(replica)
    routed = policy_input(await client.measure(user("one")), pools)
    assert (list(routed.pools), routed.last_pool) == ([Pool.GREEDY], None)


async def test_turn_that_both_pools_have_served_has_no_last_pool(client: Client) -> None:
    for pool in Pool:
        await client.send(SYSTEM, user("one"), pool=pool)
    routed = policy_input(await client.measure(SYSTEM, user("one"), answer("a"), user("two")), ready_pools())
    assert routed.last_pool is None
