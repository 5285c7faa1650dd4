"""Continuous batching like SGLang's scheduler, as a pure state machine without clock or I/O.

The driver calls `next_step`, waits for its `seconds`, and passes it to `complete`. Prefill takes precedence
over decode: queued requests are prefilled in order of arrival while they fit into the cache; otherwise all
running requests decode one step. With `serialized`, one request runs at a time, like the paper's speculative
server (Section 4.3, Table 2).
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dps_local.emulated_sglang.generation import Plan
from dps_local.emulated_sglang.radix import SHARED, Namespace, Node, RadixCache
from dps_local.emulated_sglang.time_model import TimeModel

ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE: dict[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}


class QueueFullError(Exception):
    """As many sequences wait as the queue may have. The message is SGLang's."""

    def __init__(self) -> None:
        super().__init__("The request queue is full.")


@dataclass(eq=False)
class Sequence:
    """A prompt and its answer in the engine. Times are in emulated seconds."""

    rid: str
    prompt: tuple[int, ...]
    plan: Plan
    arrived: float
    rng: random.Random
    namespace: Namespace = SHARED
    acceptance: float | None = None
    """The probability that a draft token is accepted if the previous ones were; None for the engine's mean length."""
    admitted: float | None = None
    first_token: float | None = None
    finished: float | None = None
    finish_reason: dict[str, Any] | None = None
    cached_tokens: int = 0
    fetched_from: int | None = None
    """The tokens that were cached before others were fetched from the storage; None if none were fetched."""
    written: int = 0
    """The tokens whose pages the engine has found, written to the storage, or tried to write."""
    generated: int = 0
    verify_steps: int = 0
    accepted: list[int] = field(default_factory=list)
    node: Node | None = None
    reserved: int = 0

    @property
    def aborted_in_queue(self) -> bool:
        """Whether it was aborted before it was admitted."""
        return self.finished is not None and self.admitted is None

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompt, as an answer reports them."""
        return 0 if self.aborted_in_queue else len(self.prompt)

    @property
    def storage_tokens(self) -> int:
        """The part of `cached_tokens` that was fetched from the storage."""
        return 0 if self.fetched_from is None else max(0, self.cached_tokens - self.fetched_from)

    @property
    def computed(self) -> tuple[int, ...]:
        """The tokens whose KV has been computed. The last token was sampled but not fed back."""
        return self.prompt + self.plan.token_ids[: self.generated - 1] if self.generated else ()

    @property
    def accepted_drafts(self) -> int:
        """Draft tokens that were accepted, not counting bonus tokens."""
        return sum(count * times for count, times in enumerate(self.accepted))


class StepKind(Enum):
    """The kind of a forward pass."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True)
class Step:
    """A forward pass over `sequences` that takes `seconds`."""

    kind: StepKind
    sequences: tuple[Sequence, ...]
    seconds: float
    uncached_tokens: int = 0


class Scheduler:
    """Queued and running sequences that share one radix cache of `capacity` tokens."""

    MAX_PREFILL_TOKENS = 16_384
    """Tokens after which a prefill pass admits no further request: SGLang's --max-prefill-tokens."""

    def __init__(
        self,
        time_model: TimeModel,
        capacity: int,
        max_running: int,
        serialized: bool = False,
        page_tokens: int = 1,
        draft_refill: bool = False,
        max_queued: int | None = None,
    ) -> None:
        self.cache = RadixCache()
        self.capacity = capacity
        self.max_running = 1 if serialized else max_running
        self.page_tokens = page_tokens
        self._draft_refill = draft_refill
        self._max_queued = max_queued
        self.time_model = time_model
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: dict[str, Sequence] = {}
        self._reserved = 0

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Queued sequences, oldest first."""
        return tuple(self._waiting.values())

    @property
    def used_tokens(self) -> int:
        """Tokens of the cache that running sequences occupy or have reserved."""
        return self._reserved + self.cache.size - self.cache.evictable

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of all queued and running sequences."""
        return (*self._waiting, *self._running)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises QueueFullError, and ValueError if its prompt and answer together exceed the cache.
        """
        if self._max_queued is not None and len(self._waiting) >= self._max_queued:
            raise QueueFullError
        if len(sequence.prompt) + len(sequence.plan.token_ids) > self.capacity:
            raise ValueError(
                f"Request prompt exceeds the KV memory budget: input_len={len(sequence.prompt)}."
            )
        self._waiting[sequence.rid] = sequence

    def abort(self, rid: str, now: float) -> Sequence | None:
        """Remove a sequence from the queue or the batch. Its computed tokens stay cached.

        Returns None if there is no such sequence.
        """
        sequence = self._waiting.pop(rid, None) or self._running.get(rid)
        if sequence is None:
            return None
        self._finish(sequence, dict(ABORTED_IN_QUEUE if sequence.admitted is None else ABORTED), now)
        return sequence

    def flush(self) -> bool:
        """Empty the cache. Returns False, without effect, while a sequence is queued or running."""
        if self._waiting or self._running:
            return False
        self.cache = RadixCache()
        return True

    def cached(self, sequence: Sequence) -> int:
        """The tokens of a sequence's prompt that it would find in the cache now."""
        return self._whole_pages(self.cache.match(sequence.prompt[:-1], sequence.namespace).length)

    def insert(self, tokens: tuple[int, ...], namespace: Namespace = SHARED) -> bool:
        """Cache tokens that were fetched, and evict others for them. Returns False if there is no room."""
        if len(tokens) > self.capacity - self.used_tokens:
            return False
        match = self.cache.match(tokens, namespace)
        self.cache.lock(match.node)
        self.cache.evict(len(tokens) - match.length - (self.capacity - self._reserved - self.cache.size))
        self.cache.insert(tokens, namespace)
        self.cache.unlock(match.node)
        return True

    def next_step(self, now: float) -> Step | None:
        """The next forward pass, or None if there is nothing to do."""
        admitted = self._admit(now)
        if admitted:
            uncached = sum(len(sequence.prompt) - sequence.cached_tokens for sequence in admitted)
            refilled = sum(sequence.storage_tokens for sequence in admitted) if self._draft_refill else 0
            seconds = self.time_model.prefill_seconds(uncached, refilled)
            return Step(StepKind.PREFILL, tuple(admitted), seconds, uncached)
        if self._running:
            batch = tuple(self._running.values())
            return Step(StepKind.DECODE, batch, self.time_model.decode_seconds(len(batch)))
        return None

    def complete(self, step: Step, now: float) -> tuple[Sequence, ...]:
        """Finish a step. Returns the sequences that received tokens, which excludes those aborted meanwhile."""
        progressed = tuple(sequence for sequence in step.sequences if sequence.finished is None)
        for sequence in progressed:
            if step.kind is StepKind.PREFILL:
                self._cache_prompt(sequence)
                sequence.first_token = now
                tokens = 1
            else:
                tokens = self._decoded(sequence)
            sequence.generated = min(sequence.generated + tokens, len(sequence.plan.token_ids))
            if sequence.generated == len(sequence.plan.token_ids):
                self._finish(sequence, sequence.plan.finish_reason, now)
        return progressed

    def _admit(self, now: float) -> list[Sequence]:
        admitted: list[Sequence] = []
        uncached = 0
        while self._waiting and len(self._running) < self.max_running and uncached < self.MAX_PREFILL_TOKENS:
            sequence = next(iter(self._waiting.values()))
            # The last prompt token is always computed, because its logits yield the first token of the answer.
            match = self.cache.match(sequence.prompt[:-1], sequence.namespace)
            needed = len(sequence.prompt) - match.length + len(sequence.plan.token_ids)
            self.cache.lock(match.node)
            free = self.capacity - self.cache.size - self._reserved
            if free + self.cache.evictable < needed:
                self.cache.unlock(match.node)
                break
            self.cache.evict(needed - free)
            self._waiting.popitem(last=False)
            self._running[sequence.rid] = sequence
            sequence.node, sequence.reserved = match.node, needed
            sequence.cached_tokens = self._whole_pages(match.length)
            whole = self.cache.match(sequence.prompt, sequence.namespace)
            sequence.written = self._whole_pages(whole.length)
            sequence.admitted = now
            self._reserved += needed
            uncached += len(sequence.prompt) - sequence.cached_tokens
            admitted.append(sequence)
        return admitted

    def _whole_pages(self, tokens: int) -> int:
        return tokens // self.page_tokens * self.page_tokens

    def _cache_prompt(self, sequence: Sequence) -> None:
        """Cache the computed prompt, so that other sequences can share it while this one decodes."""
        node = self.cache.insert(sequence.prompt, sequence.namespace)
        self._move(sequence, node, len(sequence.plan.token_ids))

    def _decoded(self, sequence: Sequence) -> int:
        speculation = self.time_model.speculation
        if speculation is None:
            return 1
        if sequence.acceptance is None:
            whole, rest = divmod(speculation.acceptance_length, 1)
            tokens = min(max(1, int(whole) + (sequence.rng.random() < rest)), speculation.draft_tokens)
        else:
            tokens = 1
            while tokens < speculation.draft_tokens and sequence.rng.random() < sequence.acceptance:
                tokens += 1
        sequence.verify_steps += 1
        # The draft length of an engine may change during an answer.
        sequence.accepted += [0] * (speculation.draft_tokens - len(sequence.accepted))
        sequence.accepted[tokens - 1] += 1
        return tokens

    def _finish(self, sequence: Sequence, reason: dict[str, Any], now: float) -> None:
        sequence.finished, sequence.finish_reason = now, reason
        if self._running.pop(sequence.rid, None) is None:
            return
        node = sequence.node
        if sequence.generated:
            node = self.cache.insert(sequence.computed, sequence.namespace)
        assert node is not None
        self._move(sequence, node, 0)
        self.cache.unlock(node)

    def _move(self, sequence: Sequence, node: Node, reserved: int) -> None:
        """Lock `node` instead of the sequence's previous node, and reserve `reserved` tokens beyond it."""
        assert sequence.node is not None
        self.cache.lock(node)
        self.cache.unlock(sequence.node)
        self._reserved += reserved - sequence.reserved
        sequence.node, sequence.reserved = node, reserved
