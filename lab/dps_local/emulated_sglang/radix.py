"""The radix cache: the token prefixes whose KV cache is in memory, with a page size of 1. This module performs no I/O.

It models SGLang's RadixAttention (Zheng et al., 2024): a tree whose edges are runs of tokens, shared by all
requests with the same prefix. The least recently used leaf is evicted first; prefixes of running requests are
locked.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Namespace = tuple[str | None, str | None]
"""A request's `extra_key` and `cache_salt`. Requests share cached prefixes only if both are equal."""
SHARED: Namespace = (None, None)
"""The namespace of requests that set neither."""


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens that follows its parent's. `locks` counts the requests that use it or a descendant."""

    tokens: tuple[int, ...]
    parent: "Node | None"
    last_used: int
    locks: int = 0
    children: "dict[int, Node]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: its length in tokens, and the node at which it ends."""

    length: int
    node: Node


class RadixCache:
    """Token prefixes. Unlocked leaves are evicted, the least recently used first."""

    def __init__(self) -> None:
        self._roots: dict[Namespace, Node] = {}
        self._uses = 0
        self._size = 0
        self._locked = 0

    @property
    def size(self) -> int:
        """Cached tokens."""
        return self._size

    @property
    def evictable(self) -> int:
        """Cached tokens that no request uses."""
        return self._size - self._locked

    def match(self, tokens: Sequence[int], namespace: Namespace = SHARED) -> Match:
        """The longest prefix of `tokens` that is cached in `namespace`. It becomes the most recently used."""
        self._uses += 1
        node, position = self._roots.setdefault(namespace, Node((), None, 0)), 0
        while position < len(tokens):
            child = node.children.get(tokens[position])
            if child is None:
                break
            shared = _shared_prefix(child.tokens, tokens, position)
            node = self._split(child, shared) if shared < len(child.tokens) else child
            node.last_used = self._uses
            position += shared
            if node is not child:
                break
        return Match(position, node)

    def insert(self, tokens: Sequence[int], namespace: Namespace = SHARED) -> Node:
        """Cache all of `tokens` in `namespace` and return the node at which they end."""
        match = self.match(tokens, namespace)
        if match.length == len(tokens):
            return match.node
        leaf = Node(tuple(tokens[match.length :]), match.node, self._uses)
        match.node.children[leaf.tokens[0]] = leaf
        self._size += len(leaf.tokens)
        return leaf

    def lock(self, node: Node) -> None:
        """Protect `node` and its ancestors from eviction until `unlock`."""
        for ancestor in self._path(node):
            if ancestor.locks == 0:
                self._locked += len(ancestor.tokens)
            ancestor.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of `node`."""
        for ancestor in self._path(node):
            ancestor.locks -= 1
            if ancestor.locks == 0:
                self._locked -= len(ancestor.tokens)

    def evict(self, tokens: int) -> int:
        """Evict least recently used leaves until `tokens` tokens are freed or no leaf is left.

        Returns the number of tokens freed.
        """
        if tokens <= 0:
            return 0
        leaves = [(leaf.last_used, id(leaf), leaf) for leaf in self._unlocked_leaves()]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < tokens:
            _, _, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.tokens[0]]
            freed += len(leaf.tokens)
            if parent.parent is not None and not parent.children and parent.locks == 0:
                heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        self._size -= freed
        return freed

    def _split(self, node: Node, at: int) -> Node:
        """Split `node` in two and return the upper half, which replaces it in its parent."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.tokens[:at], parent, node.last_used, node.locks, {node.tokens[at]: node})
        parent.children[upper.tokens[0]] = upper
        node.tokens = node.tokens[at:]
        node.parent = upper
        return upper

    def _path(self, node: Node) -> Iterator[Node]:
        while node.parent is not None:
            yield node
            node = node.parent

    def _unlocked_leaves(self) -> Iterator[Node]:
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            elif node.locks == 0:
                yield node


def _shared_prefix(run: tuple[int, ...], tokens: Sequence[int], start: int) -> int:
    """The length of the common prefix of `run` and `tokens[start:]`.

    Compares whole runs first, the common case, and then bisects.
    """
    low, high = 0, min(len(run), len(tokens) - start)
    if run[:high] == tuple(tokens[start : start + high]):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if run[low:middle] == tuple(tokens[start + low : start + middle]):
            low = middle
        else:
            high = middle - 1
    return low
