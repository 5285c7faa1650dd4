"""One engine in virtual time: the emulated engine's scheduler, with durations from the roofline."""

import random
from dataclasses import dataclass, replace
from typing import Any, Final

from dps_gateway.pool import Pool
from dps_gateway.routing.decision import CacheUnits
from dps_gateway.upstream.replica import Load
from dps_lab.simulate.prompts import PlannedTurn
from dps_lab.simulate.roofline import EngineTiming
from dps_local.emulated_sglang.generation import Plan
from dps_local.emulated_sglang.scheduler import Scheduler, Sequence, Step, StepKind
from dps_local.emulated_sglang.time_model import TimeModel

_LENGTH: Final[dict[str, Any]] = {"type": "length"}


@dataclass(frozen=True)
class CacheLink:
    """Another engine whose cached prefixes this one can fetch, at `seconds_per_token`.

    `draft_refill`: the draft model has to prefill what was fetched, since the other engine has no draft KV.
    """

    writer: "VirtualEngine"
    seconds_per_token: float
    draft_refill: bool


@dataclass(frozen=True)
class Fetch:
    """A transfer from another engine's cache.

    tokens: length of the prompt's prefix that is cached after the transfer. missing_tokens: tokens transferred.
    """

    tokens: int
    missing_tokens: int
    seconds: float
    draft_refill: bool


class VirtualEngine:
    """An engine of one pool. It has no clock: the caller advances time by the duration of each step."""

    def __init__(
        self,
        url: str,
        pool: Pool,
        timing: EngineTiming,
        capacity: int,
        max_running: int,
        serialized: bool,
    ) -> None:
        self.url = url
        self.pool = pool
        self.timing = timing
        self.units = CacheUnits()
        self.links: list[CacheLink] = []
        # The scheduler needs the time model for the acceptance length; step durations come from `timing`.
        model = TimeModel(speculation=timing.speculation)
        self.scheduler = Scheduler(model, capacity, max_running, serialized)
        self._refills: dict[str, int] = {}

    @property
    def load(self) -> Load:
        """What the engine reports about its requests, as SGLang does at /v1/loads."""
        scheduler = self.scheduler
        tokens = sum(len(each.prompt) - scheduler.cached(each) for each in scheduler.waiting)
        free = scheduler.capacity - scheduler.used_tokens
        return Load(scheduler.running, len(scheduler.waiting), tokens, scheduler.max_running, free)

    def sequence(self, rid: str, turn: PlannedTurn, now: float) -> Sequence:
        """A request for this engine. `rid` seeds the random acceptance of drafts."""
        plan = Plan(turn.answer, "", (), _LENGTH)
        return Sequence(rid, turn.prompt, plan, now, random.Random(rid), acceptance=turn.acceptance)

    def fetch_for(self, prompt: tuple[int, ...]) -> Fetch | None:
        """The transfer that saves the most prefill for this prompt; None if it is shorter than SGLang's threshold."""
        if not self.links:
            return None
        own = self.scheduler.cache.match(prompt[:-1]).length
        held = [(link.writer.scheduler.cache.match(prompt[:-1]).length, link) for link in self.links]
        tokens, link = max(held, key=lambda pair: pair[0])
        missing = tokens - own
        if missing < self.units.fetch_threshold_tokens:
            return None
        return Fetch(tokens, missing, missing * link.seconds_per_token, link.draft_refill)

    def submit(self, sequence: Sequence, fetched: Fetch | None = None) -> None:
        """Queue a request, after inserting the tokens fetched for it into the cache if there is room."""
        if fetched is not None:
            inserted = self.scheduler.insert(sequence.prompt[: fetched.tokens])
            if inserted and fetched.draft_refill:
                self._refills[sequence.rid] = fetched.missing_tokens
        self.scheduler.submit(sequence)

    def next_step(self, now: float) -> Step | None:
        """The next forward pass with its duration by the roofline; None if the engine has no work."""
        step = self.scheduler.next_step(now)
        if step is None:
            return None
        refilled = 0
        if step.kind is StepKind.PREFILL and self._refills:
            refilled = sum(self._refills.pop(sequence.rid, 0) for sequence in step.sequences)
        return replace(step, seconds=self.step_seconds(step, refilled))

    def step_seconds(self, step: Step, refilled_tokens: int) -> float:
        """Duration of a step that the engine is about to run. refilled_tokens: see `EngineTiming.step_seconds`."""
        return self.timing.step_seconds(step, refilled_tokens)
