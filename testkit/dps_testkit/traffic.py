"""Continuous load: concurrent agents that send multi-turn sessions through the `openai` SDK, as users do.

Every attempt of a turn is counted, so the SDK's own retries are disabled. Between two turns no session state may be
lost: ΔL_t is checked against L_t, and L_t against the engine's count, so no tokenizer is needed.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import httpx2
import openai
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

from dps_lab.replay.records import Verdict

FIRST_WAIT = 0.1
LONGEST_WAIT = 2.0
CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 30.0
"""Read timeout between two bytes of an answer."""
SHORT, LONG = "And why is that?", "Tell me more about the sky over Oslo in November, please. " * 20
"""User messages of less and of more than 128 tokens."""
POLL_SECONDS = 0.05


class Truncated(Exception):
    """An answer ended early."""


@dataclass(frozen=True)
class Attempt:
    """One request.

    verdict: the decision in the response headers; None if the request failed before they arrived.
    error: None for a complete answer.
    event: whether the error was an event in the stream, which the gateway sends when an engine is lost.
    """

    verdict: Verdict | None = None
    error: str | None = None
    event: bool = False


@dataclass
class Turn:
    """One turn with all its attempts. `began` is in seconds on the monotonic clock."""

    streamed: bool
    began: float
    attempts: list[Attempt] = field(default_factory=list)
    answer: str = ""
    prompt_tokens: int | None = None
    """L as reported by the engine."""
    lost: str | None = None
    """Describes the session state that was lost; None if none was."""

    @property
    def verdict(self) -> Verdict | None:
        """The decision of the first attempt with response headers.

        Later attempts are ignored: if the first one committed the prompt, their ΔL is 0.
        """
        return next((attempt.verdict for attempt in self.attempts if attempt.verdict is not None), None)

    @property
    def failed(self) -> bool:
        """Whether no attempt returned a complete answer."""
        return self.attempts[-1].error is not None


class Client:
    """An agent that sends one turn at a time, with an SDK client of its own."""

    def __init__(self, client: openai.AsyncOpenAI, options: "LoadOptions") -> None:
        self._openai = client
        self._options = options

    async def send(
        self, messages: list[ChatCompletionMessageParam], session_id: str | None, *, stream: bool
    ) -> Turn:
        """Send one turn until the answer is complete or the maximum number of attempts is reached."""
        turn = Turn(stream, time.monotonic())
        request: dict[str, Any] = {
            "model": self._options.model,
            "messages": messages,
            "max_tokens": self._options.answer_tokens,
            "extra_body": {"ignore_eos": True},
            "extra_headers": {} if session_id is None else {"x-session-id": session_id},
        }
        wait = FIRST_WAIT
        while True:
            turn.attempts.append(await self._attempt(turn, request))
            if not turn.failed or len(turn.attempts) == self._options.attempts:
                return turn
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)

    async def _attempt(self, turn: Turn, request: dict[str, Any]) -> Attempt:
        create = self._openai.chat.completions.with_raw_response.create
        verdict: Verdict | None = None
        try:
            if turn.streamed:
                streamed = await create(**request, stream=True, stream_options={"include_usage": True})
                verdict = Verdict.of(streamed.headers)
                await _read_stream(turn, streamed.parse())
            else:
                whole = await create(**request, stream=False)
                verdict = Verdict.of(whole.headers)
                _read(turn, whole.parse())
        except openai.APIStatusError as error:
            return Attempt(verdict, f"status {error.status_code}: {error.message}")
        except openai.APIConnectionError as error:
            return Attempt(verdict, f"{error.message} ({error.__cause__!r})")
        except openai.APIError as error:
            return Attempt(verdict, f"error event: {error.message}", event=True)
        except Truncated as error:
            return Attempt(verdict, f"truncated: {error}")
        return Attempt(verdict)


def _read(turn: Turn, answer: ChatCompletion) -> None:
    if not answer.choices or answer.choices[0].finish_reason is None or answer.usage is None:
        raise Truncated(f"no finish_reason or no usage: {answer}")
    turn.answer = answer.choices[0].message.content or ""
    turn.prompt_tokens = answer.usage.prompt_tokens


async def _read_stream(turn: Turn, stream: openai.AsyncStream[ChatCompletionChunk]) -> None:
    text = ""
    reason: str | None = None
    usage: CompletionUsage | None = None
    async with stream:
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
    if reason is None or usage is None:
        raise Truncated("the stream ended without a finish_reason, or without usage")
    turn.answer, turn.prompt_tokens = text, usage.prompt_tokens


@dataclass(frozen=True)
class Row:
    """What clients observed in one case. troubles: descriptions of all errors and of all lost session state."""

    case: str
    retries: int
    events: int
    failures: int
    forgotten: int
    troubles: tuple[str, ...] = field(default=(), repr=False)

    @property
    def unnoticed(self) -> bool:
        """Whether no client observed the fault."""
        return self.retries == self.events == self.failures == self.forgotten == 0

    @classmethod
    def of(cls, case: str, turns: Sequence[Turn]) -> "Row":
        """Summarise the turns that ended during a case. Raises ValueError if there were none."""
        if not turns:
            raise ValueError(f"{case}: no turn ended while it was observed")
        attempts = [attempt for turn in turns for attempt in turn.attempts]
        troubles = [attempt.error for attempt in attempts] + [turn.lost for turn in turns]
        return cls(
            case=case,
            retries=len(attempts) - len(turns),
            events=sum(attempt.event for attempt in attempts),
            failures=sum(turn.failed for turn in turns),
            forgotten=sum(turn.lost is not None for turn in turns),
            troubles=tuple(trouble for trouble in troubles if trouble),
        )


@dataclass(frozen=True)
class LoadOptions:
    """The parameters of the load.

    base_url: includes /v1. agents: number of concurrent sessions. think_seconds: pause between turns.
    attempts: how often a turn is sent before it counts as failed; the pauses between 30 attempts add up to 51 s.
    """

    base_url: str
    model: str
    agents: int = 8
    turns: int = 6
    answer_tokens: int = 12
    think_seconds: float = 0.1
    attempts: int = 30


@dataclass
class Traffic:
    """Running load. `checkpoint` summarises the turns since the previous checkpoint."""

    options: LoadOptions
    turns: list[Turn] = field(default_factory=list)
    """The turns that ended since the last checkpoint."""
    _agents: list[asyncio.Task[None]] = field(default_factory=list)
    _began: dict[int, float] = field(default_factory=dict)
    """Start time of the last finished turn, by agent."""

    async def checkpoint(self, case: str) -> Row:
        """Summarise all turns since the last checkpoint, once every agent has finished a turn begun after this call."""
        now = time.monotonic()
        await self._until(lambda: all(began > now for began in self._began.values()))
        turns, self.turns = self.turns, []
        return Row.of(case, turns)

    async def observe(self, turns: int) -> None:
        """Wait until `turns` more turns have ended."""
        target = len(self.turns) + turns
        await self._until(lambda: len(self.turns) >= target)

    async def start(self) -> None:
        """Start the agents, which run until `stop`."""
        self._began = dict.fromkeys(range(self.options.agents), 0.0)
        self._agents = [asyncio.create_task(self._agent(number)) for number in self._began]

    async def stop(self) -> None:
        """Cancel the agents, even in the middle of a turn."""
        for agent in self._agents:
            agent.cancel()
        await asyncio.gather(*self._agents, return_exceptions=True)

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached` is true. Raises the exception of any agent that has ended."""
        while not reached():
            for agent in self._agents:
                if agent.done():
                    agent.result()
            await asyncio.sleep(POLL_SECONDS)

    async def _agent(self, number: int) -> None:
        """Send sessions until cancelled. Every second session sends its id; two of every four reuse connections.

        Behind a Service, a connection belongs to a replica.
        """
        options = self.options
        for session in itertools.count(number):
            limits = httpx2.Limits(max_keepalive_connections=None if session // 2 % 2 == 0 else 0)
            async with openai.AsyncOpenAI(
                base_url=options.base_url,
                api_key="none",
                max_retries=0,
                timeout=openai.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
                # Plain HTTP needs no certificates, which take time to load.
                http_client=openai.DefaultAsyncHttpxClient(limits=limits, verify=False),
            ) as client:
                await self._session(Client(client, options), number, named=session % 2 == 0)

    async def _session(self, client: Client, agent: int, *, named: bool) -> None:
        identity = uuid4().hex
        history: list[ChatCompletionMessageParam] = [
            {"role": "system", "content": f"You are assistant {identity} of the weather desk."}
        ]
        last: Turn | None = None
        for number in range(self.options.turns):
            # Agents are out of phase, so that short and long turns, streaming or not, run at the same time.
            text = LONG if (agent // 2 + number) % 2 else SHORT
            history.append({"role": "user", "content": f"{number}: {text}"})
            turn = await client.send(history, identity if named else None, stream=(agent + number) % 2 == 0)
            turn.lost = _lost(last, turn)
            self.turns.append(turn)
            self._began[agent] = turn.began
            verdict = turn.verdict
            if turn.failed or verdict is None or verdict.prompt_tokens is None:
                return
            last = turn
            history.append({"role": "assistant", "content": turn.answer})
            await asyncio.sleep(self.options.think_seconds)


def _lost(last: Turn | None, turn: Turn) -> str | None:
    """The first session state found lost, or prompt length found wrong, in the attempts of a turn.

    The turn must be the next one, and ΔL_t must be L_t - L_{t-1} (Eq. 1). If an attempt without a complete answer was
    committed, the next one is the same turn with ΔL_t = 0.
    """
    before = last.verdict if last is not None else None
    number, length = (before.turn or 0, before.prompt_tokens or 0) if before is not None else (0, 0)
    for repeated, attempt in enumerate(turn.attempts):
        found = attempt.verdict
        if found is None:
            continue
        if found.prompt_tokens is None:
            return f"no decision in the answer's headers: {found}"
        accepted = [("grown" if number else "new", number + 1, found.prompt_tokens - length)]
        accepted += [("grown", number + 1, 0)] * bool(repeated)
        actual = (found.history, found.turn, found.delta_tokens)
        if actual not in accepted:
            return f"history, turn and ΔL are {actual} (state: {found.state}), not {accepted}"
        if attempt.error is None and found.prompt_tokens != turn.prompt_tokens:
            return f"the gateway counted {found.prompt_tokens} prompt tokens, the engine {turn.prompt_tokens}"
    return None


@asynccontextmanager
async def traffic(options: LoadOptions) -> AsyncIterator[Traffic]:
    """Generate load until the block exits."""
    running = Traffic(options)
    await running.start()
    try:
        yield running
    finally:
        await running.stop()
