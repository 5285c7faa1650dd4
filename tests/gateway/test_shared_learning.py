"""The exchange of what a learning policy has learned, between gateway processes that run and that have ended."""

from collections.abc import Iterable, Sequence

import pytest

from dps_gateway.config import parse_config
from dps_gateway.pool import Pool
from dps_gateway.routing.decision import Decision, Document, LearningPolicy, Observation, PolicyInput, Reason
from dps_gateway.routing.policies import AlwaysGreedy
from dps_gateway.session.redis import StoreUnavailable
from dps_gateway.shared_learning import ENOUGH_TURNS, LIVE_SECONDS, SharedLearning, learned_key
from dps_testkit.clock import ManualClock
from tests.gateway.adaptive_turns import answer

KEY = "dps:learned:test"

OBSERVATION = answer(Pool.GREEDY, seconds_per_token=0.01)


class Store:
    """A dictionary in place of Redis."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, bytes]] = {}
        self.unavailable = False

    async def set_field(self, key: str, field: str, value: bytes, ttl_seconds: int) -> dict[str, bytes]:
        if self.unavailable:
            raise StoreUnavailable("unavailable")
        self.values.setdefault(key, {})[field] = value
        return dict(self.values[key])

    async def delete_fields(self, key: str, fields: Sequence[str]) -> None:
        for field in fields:
            del self.values[key][field]


class Policy(LearningPolicy):
    """Exports its name, and remembers what it absorbed last."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.observed = 0
        self.absorbed: list[str] = []

    def decide(self, turn: PolicyInput, /) -> Decision:
        return Decision(Pool.GREEDY, Reason.PREDICTED_FASTER)

    def observe(self, observation: Observation, /) -> None:
        self.observed += 1

    def export(self) -> Document:
        return {"name": self.name}

    def absorb(self, documents: Iterable[Document], /) -> None:
        self.absorbed = sorted(document["name"] for document in documents)


class Process:
    """One gateway process."""

    def __init__(self, name: str, store: Store, clock: ManualClock, turns: int = 0) -> None:
        self.policy = Policy(name)
        self.learning = SharedLearning(store, clock)
        for _ in range(turns):
            self.learning.observe(self.policy, OBSERVATION)

    async def exchange(self) -> list[str]:
        """The names of the policies whose documents it uses after an exchange."""
        await self.learning.synchronize(self.policy, KEY)
        return self.policy.absorbed


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def test_running_processes_use_each_others_documents_but_not_their_own(
    store: Store, clock: ManualClock
) -> None:
    processes = [Process(name, store, clock, turns=ENOUGH_TURNS) for name in "abc"]
    for process in processes:
        await process.exchange()
    assert [await process.exchange() for process in processes] == [["b", "c"], ["a", "c"], ["a", "b"]]


async def test_new_process_uses_what_an_ended_one_has_learned_until_it_has_observed_enough(
    store: Store, clock: ManualClock
) -> None:
    await Process("ended", store, clock, turns=500).exchange()
    clock.now += 3600
    new = Process("new", store, clock, turns=ENOUGH_TURNS - 1)
    assert await new.exchange() == ["ended"]
    assert await new.exchange() == ["ended"]
    new.learning.observe(new.policy, OBSERVATION)
    assert await new.exchange() == []
    assert len(store.values[KEY]) == 1


async def test_of_several_ended_processes_the_one_that_observed_most_is_used_and_the_others_are_deleted(
    store: Store, clock: ManualClock
) -> None:
    for name, turns in (("old", 700), ("newer", 300), ("crashed early", 3)):
        await Process(name, store, clock, turns=turns).exchange()
        clock.now += LIVE_SECONDS + 1
    assert await Process("new", store, clock).exchange() == ["newer"]
    assert len(store.values[KEY]) == 2


async def test_policy_keeps_what_it_has_absorbed_while_the_store_is_unavailable(
    store: Store, clock: ManualClock
) -> None:
    await Process("other", store, clock).exchange()
    process = Process("own", store, clock)
    await process.exchange()
    store.unavailable = True
    assert await process.exchange() == ["other"]


@pytest.mark.parametrize(
    "value",
    [b"", b"no JSON", b"[]", b"{}", b'{"written": "x", "turns": 1, "learned": {}}'],
    ids=["empty", "no JSON", "a list", "no fields", "other types"],
)
async def test_values_that_are_not_valid_are_ignored(store: Store, clock: ManualClock, value: bytes) -> None:
    store.values[KEY] = {"other": value}
    assert await Process("own", store, clock).exchange() == []


async def test_nothing_is_exchanged_without_redis_or_a_policy_that_learns(
    store: Store, clock: ManualClock
) -> None:
    await SharedLearning(store, clock).synchronize(AlwaysGreedy(), KEY)
    assert store.values == {}
    policy, learning = Policy("own"), SharedLearning(None)
    learning.observe(policy, OBSERVATION)
    await learning.synchronize(policy, KEY)
    assert (policy.observed, policy.absorbed) == (1, [])


def key(model: str = "m", port: int = 1, routing: str = "{policy: Adaptive}", extra: str = "") -> str:
    text = f"""
model: {{name: {model}, tokenizer: t}}
pools: {{speculative: {{endpoints: ["http://a:{port}"]{extra}}}, greedy: {{endpoints: ["http://b:1"]}}}}
routing: {routing}
"""
    return learned_key(parse_config(text, source="test", environment={}))


def test_key_is_that_of_the_policy_the_model_and_the_engines() -> None:
    assert key().startswith("dps:learned:Adaptive:")
    assert key() == key(extra=", apiKeyFile: k") == key(routing="{policy: Adaptive, thresholdTokens: 1}")
    assert len({key(), key(model="n"), key(port=2), key(routing="{policy: DeltaPrefill}")}) == 4
