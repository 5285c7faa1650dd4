"""The tokens of a turn's prompt that each replica has cached, and what the policy receives about the pools."""

import pytest

from dps_gateway.pool import Pool, replica_id
from dps_gateway.routing.decision import PromptTokens
from dps_gateway.turn import MeasuredTurn, policy_input_of
from dps_gateway.upstream.admission import Admission
from dps_gateway.upstream.engine_pool import EnginePool
from tests.gateway.conversations import SYSTEM, ConversationClient, answer, sharing, url, user


def tokens(turn: MeasuredTurn, pool: Pool) -> PromptTokens:
    return turn.cached.tokens(replica_id(url(pool)))


@pytest.fixture(params=["named", None], ids=["with a session id", "without one"])
def client(request: pytest.FixtureRequest) -> ConversationClient:
    return ConversationClient(request.param)


async def test_uncached_tokens_depend_on_the_turns_that_each_pool_answered(
    client: ConversationClient,
) -> None:
    first = await client.send(SYSTEM, user("one"), pool=Pool.SPECULATIVE)
    history = [SYSTEM, user("one"), answer("a"), user("two")]
    second = await client.send(*history, pool=Pool.GREEDY)
    turn = await client.measure(*history, answer("b"), user("three"))
    assert tokens(turn, Pool.GREEDY).held == second.prompt_tokens
    assert tokens(turn, Pool.SPECULATIVE).held == first.prompt_tokens


@pytest.mark.parametrize("common", [False, True])
async def test_policy_receives_what_a_pool_can_fetch_only_if_the_pools_share_a_prefix_cache(
    common: bool,
) -> None:
    client = sharing(common)
    first = await client.send(SYSTEM, user("one"), pool=Pool.GREEDY)
    assert first.prompt_tokens >= 256
    turn = await client.measure(SYSTEM, user("one"), answer("two"), user("three"))
    new = turn.prompt_tokens - first.prompt_tokens
    moved = PromptTokens(0, first.prompt_tokens, new) if common else PromptTokens(0, 0, turn.prompt_tokens)
    views = policy_input_of(turn, ready_pools()).pools
    assert {pool: view.prompt for pool, view in views.items()} == {
        Pool.SPECULATIVE: moved,
        Pool.GREEDY: PromptTokens(first.prompt_tokens, 0, new),
    }


def ready_pools() -> dict[Pool, EnginePool]:
    pools = {pool: EnginePool(pool, 8, Admission(8)) for pool in Pool}
    for pool, engines in pools.items():
        engines.set_endpoints([url(pool)])
    return pools


async def test_policy_receives_only_pools_with_a_ready_replica(client: ConversationClient) -> None:
    pools = ready_pools()
    for replica in pools[Pool.SPECULATIVE].replicas.values():
        pools[Pool.SPECULATIVE].mark_unavailable(replica)
    routed = policy_input_of(await client.measure(user("one")), pools)
    assert (list(routed.pools), routed.last_pool) == ([Pool.GREEDY], None)


async def test_turn_that_both_pools_have_served_has_no_last_pool(client: ConversationClient) -> None:
    for pool in Pool:
        await client.send(SYSTEM, user("one"), pool=pool)
    routed = policy_input_of(
        await client.measure(SYSTEM, user("one"), answer("a"), user("two")), ready_pools()
    )
    assert routed.last_pool is None


async def test_eviction_on_one_replica_does_not_affect_the_others() -> None:
    client = ConversationClient("named")
    history = [SYSTEM, user("one " * 2000)]
    first = await client.send(*history, replica="http://one")
    turn = await client.send(*history, answer("a"), user("left"), replica="http://two")
    assert not await client.report(turn, "http://two", turn.prompt_tokens, 0)
    again = await client.send(*history, answer("b"), user("right"), replica="http://two")
    assert not await client.report(again, "http://two", again.prompt_tokens, 0)
    back = await client.measure(*history, answer("c"), user("on"))
    assert back.cached.held == {replica_id("http://one"): first.prompt_tokens}


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
    cached_tokens: int | None,
    fetched_tokens: int | None,
    held_in_memory: bool,
    shared: bool,
) -> None:
    """The session's second turn is answered by the same pool. Its prompt is more than 2,000 tokens long."""
    client = sharing()
    history = [SYSTEM, user("one " * 2000)]
    first = await client.send(*history)
    turn = await client.send(*history, answer("a"), user("right"))
    length = turn.prompt_tokens
    assert not await client.report(turn, url(Pool.GREEDY), length, cached_tokens, fetched_tokens)
    branch = await client.measure(*history, answer("b"), user("left"))
    new = branch.prompt_tokens - first.prompt_tokens
    assert branch.delta_tokens == new
    held = first.prompt_tokens if held_in_memory else 0
    fetchable = first.prompt_tokens - held if shared else 0
    assert tokens(branch, Pool.GREEDY) == PromptTokens(
        held, fetchable, first.prompt_tokens - held - fetchable + new
    )
    assert tokens(branch, Pool.SPECULATIVE).fetchable == (first.prompt_tokens if shared else 0)
