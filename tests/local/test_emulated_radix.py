"""The radix cache, compared with a set of all cached prefixes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dps_local.emulated_sglang.radix import Node, RadixCache

Tokens = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


def prefixes(tokens: Tokens) -> set[Tokens]:
    return {tokens[:end] for end in range(1, len(tokens) + 1)}


class RadixCacheMachine(RuleBasedStateMachine):
    """A reference model: all cached prefixes, and the locked ones."""

    @initialize()
    def empty(self) -> None:
        self.cache = RadixCache()
        self.cached: set[Tokens] = set()
        self.locked: list[tuple[Tokens, Node]] = []

    @rule(tokens=TOKENS)
    def insert(self, tokens: Tokens) -> None:
        self.cache.insert(tokens)
        self.cached |= prefixes(tokens)

    @rule(tokens=TOKENS)
    def lock_the_longest_match(self, tokens: Tokens) -> None:
        match = self.cache.match(tokens)
        self.cache.lock(match.node)
        self.locked.append((tokens[: match.length], match.node))

    @rule()
    def unlock_the_oldest(self) -> None:
        if self.locked:
            _, node = self.locked.pop(0)
            self.cache.unlock(node)

    @rule(tokens=TOKENS)
    def match(self, tokens: Tokens) -> None:
        longest = max((end for end in range(len(tokens) + 1) if tokens[:end] in self.cached), default=0)
        assert self.cache.match(tokens).length == longest

    @rule(wanted=st.integers(0, 20))
    def evict(self, wanted: int) -> None:
        before, evictable = self.cache.size, self.cache.evictable
        freed = self.cache.evict(wanted)
        assert freed >= min(wanted, evictable)
        assert self.cache.size == before - freed
        self.cached = {tokens for tokens in self.cached if self.cache.match(tokens).length == len(tokens)}

    @invariant()
    def size_is_the_number_of_cached_prefixes(self) -> None:
        assert self.cache.size == len(self.cached)

    @invariant()
    def what_is_locked_stays(self) -> None:
        standing = set().union(*(prefixes(tokens) for tokens, _ in self.locked))
        assert standing <= self.cached
        assert self.cache.evictable == self.cache.size - len(standing)


TestRadixCache = RadixCacheMachine.TestCase
TestRadixCache.settings = settings(max_examples=60, stateful_step_count=30)
