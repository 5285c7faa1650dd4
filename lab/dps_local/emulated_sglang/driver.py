"""The engine: runs the scheduler's steps against a clock and delivers their outputs to requests."""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final
from uuid import uuid4

from dps_local.emulated_sglang.clock import Clock
from dps_local.emulated_sglang.generation import SamplingParams, plan_answer
from dps_local.emulated_sglang.metrics import EngineMetrics
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.radix import SHARED, Namespace
from dps_local.emulated_sglang.scheduler import Scheduler, Sequence, StepKind
from dps_local.emulated_sglang.settings import EngineSettings
from dps_local.emulated_sglang.storage import Storage

ACCEPTANCE: Final[ContextVar[float | None]] = ContextVar("acceptance", default=None)
"""`Sequence.acceptance` of the request that is being answered."""


class RequestError(ValueError):
    """A well-formed request that SGLang answers with status 400. The message is SGLang's."""


@dataclass(frozen=True)
class EngineRequest:
    """A prompt, how to sample its `params.n` answers, and its id, if the client has set one.

    The prompt shares cached prefixes with others in its `namespace`.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    rid: str | None = None
    namespace: Namespace = SHARED


@dataclass(frozen=True)
class Output:
    """A sequence after a step that generated tokens for it. `tokens` is the number generated so far.

    choice: the index among all answers of the requests that were made together.
    """

    choice: int
    sequence: Sequence
    tokens: int
    finished: bool

    @property
    def text(self) -> str:
        """The text generated so far."""
        return self.sequence.plan.text_after(self.tokens)


@dataclass(frozen=True)
class _Listener:
    """Who receives the outputs of a sequence: all of them if `stream`, otherwise only the final one."""

    choice: int
    stream: bool
    outputs: asyncio.Queue[Output]


class Engine:
    """Runs prompts. Call `start` and `stop` in the event loop that serves the requests."""

    def __init__(self, settings: EngineSettings, prompts: Prompts, clock: Clock) -> None:
        storage = settings.storage
        self.settings = settings
        self.prompts = prompts
        self.scheduler = Scheduler(
            settings.time_model,
            settings.max_total_tokens,
            settings.max_running_requests,
            serialized=settings.serialized_speculation and settings.time_model.speculation is not None,
            page_tokens=settings.page_tokens,
            draft_refill=storage is not None and storage.draft_refill,
            max_queued=settings.max_queued_requests,
        )
        self.metrics = EngineMetrics(settings)
        self.storage = Storage(storage, self.metrics.count_pages) if storage else None
        self._vocabulary = prompts.vocabulary()
        self._clock = clock
        self._work = asyncio.Event()
        self._listeners: dict[str, _Listener] = {}
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start executing steps."""
        self._loop = asyncio.create_task(self._run(), name="engine steps")

    async def stop(self) -> None:
        """Stop executing steps."""
        if self._loop:
            self._loop.cancel()
            with suppress(asyncio.CancelledError):
                await self._loop

    async def run(self, requests: Iterable[EngineRequest], stream: bool) -> AsyncGenerator[Output, None]:
        """Run the requests. Yields an output for every step of each answer if `stream`, otherwise only the final ones.

        Closing the iterator early, as on a client disconnect, aborts the requests. Raises RequestError if the
        sampling parameters are invalid, or if the prompt, or prompt and answer together, exceed the context
        length or the cache, and QueueFullError.
        """
        outputs: asyncio.Queue[Output] = asyncio.Queue()
        sequences: list[Sequence] = []
        try:
            for request in requests:
                samples = request.params.n
                if samples > 1:
                    await self._prefill(request)
                for number in range(samples):
                    sequence = self._sequence(request, number)
                    self._listeners[sequence.rid] = _Listener(len(sequences), stream, outputs)
                    sequences.append(sequence)
            await asyncio.gather(*map(self._submit, sequences))
            left = len(sequences)
            while left:
                output = await outputs.get()
                left -= output.finished
                yield output
        finally:
            for sequence in sequences:
                self.abort(sequence.rid)
                del self._listeners[sequence.rid]

    async def _prefill(self, request: EngineRequest) -> None:
        """Prefill a prompt once before its samples, as SGLang does, so that each sample finds it cached."""
        params = request.params.model_copy(update={"n": 1, "max_new_tokens": 0})
        async with aclosing(self.run([replace(request, params=params, rid=None)], stream=False)) as run:
            async for _ in run:
                pass

    async def _submit(self, sequence: Sequence) -> None:
        await self._fetch(sequence)
        self.scheduler.submit(sequence)
        self._work.set()

    def abort(self, rid: str) -> None:
        """Abort a queued or running request. Its consumer gets a final output with finish reason `abort`."""
        sequence = self.scheduler.abort(rid, self._clock.now())
        if sequence is not None:
            self._publish(sequence, aborted=True)
            self.metrics.observe_load(self.scheduler)

    def abort_matching(self, prefix: str) -> None:
        """Abort every request whose id starts with `prefix`."""
        for rid in self.scheduler.request_ids:
            if rid.startswith(prefix):
                self.abort(rid)

    def _sequence(self, request: EngineRequest, sample: int) -> Sequence:
        prompt, params, longest = request.prompt, request.params, self.settings.context_length
        rid = request.rid if request.rid and params.n == 1 else uuid4().hex
        if rid in self._listeners:
            raise RequestError(f"Duplicate request ID detected: {rid}")
        if problem := params.problem():
            raise RequestError(problem)
        if not prompt:
            raise RequestError("The prompt is empty.")
        if len(prompt) >= longest:
            raise RequestError(
                f"The input ({len(prompt)} tokens) is longer than the model's context length ({longest} tokens)."
            )
        requested = params.max_new_tokens
        if requested is not None and len(prompt) + requested > longest:
            raise RequestError(
                f"Requested token count exceeds the model's maximum context length of "
                f"{longest} tokens. You requested a total of {len(prompt) + requested} tokens: "
                f"{len(prompt)} tokens from the input messages and {requested} tokens for the completion. Please "
                "reduce the number of tokens in the input messages or the completion to fit within the limit."
            )
        room = min(longest, self.scheduler.capacity) - len(prompt) - 1
        if room < 0:
            raise RequestError(f"Request prompt exceeds the KV memory budget: input_len={len(prompt)}.")
        plan = plan_answer(self._vocabulary, self.settings.seed, prompt, params, room, sample)
        rng, acceptance = random.Random(plan.text), ACCEPTANCE.get()
        return Sequence(rid, prompt, plan, self._clock.now(), rng, request.namespace, acceptance)

    async def _fetch(self, sequence: Sequence) -> None:
        """Fetch the part of the prompt that other engines have computed."""
        if self.storage is None:
            return
        cached = self.scheduler.cached(sequence)
        fetch = self.storage.fetch(sequence.prompt, sequence.namespace, cached)
        if fetch is None:
            return
        await self._clock.wait(fetch.seconds)
        if fetch.tokens == cached:
            return
        self.metrics.fetched(fetch.tokens - cached, fetch.seconds)
        if self.scheduler.insert(sequence.prompt[: fetch.tokens], sequence.namespace):
            sequence.fetched_from = cached

    async def _run(self) -> None:
        while True:
            step = self.scheduler.next_step(self._clock.now())
            if step is None:
                self._work.clear()
                await self._work.wait()
                self._clock.idle()
                continue
            self.metrics.observe_load(self.scheduler)
            await self._clock.sleep(step.seconds)
            for sequence in self.scheduler.complete(step, self._clock.now()):
                if self.storage and (step.kind is StepKind.PREFILL or sequence.finished is not None):
                    sequence.written = self.storage.write(
                        sequence.computed, sequence.namespace, sequence.written
                    )
                self._publish(sequence, aborted=False)
            self.metrics.step_done(step, self.scheduler)

    def _publish(self, sequence: Sequence, aborted: bool) -> None:
        finished = sequence.finished is not None
        listener = self._listeners[sequence.rid]
        if finished:
            self.metrics.finished(sequence, listener.stream, aborted)
        if finished or listener.stream:
            output = Output(listener.choice, sequence, sequence.generated, finished)
            listener.outputs.put_nowait(output)
