"""Answers a request on any inference API: the API's `Form` says how the engine's outputs are written."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any

import orjson
from aiohttp import web

from dps_local.emulated_sglang.driver import Engine, EngineRequest, Output
from dps_local.emulated_sglang.http import DISCONNECT_AFTER_CHUNKS, RefusedError, json_response
from dps_local.emulated_sglang.scheduler import QueueFullError
from dps_local.emulated_sglang.scheduler import Sequence as EngineSequence
from dps_local.emulated_sglang.storage import BACKEND

Event = dict[str, Any]


class Form(ABC):
    """How an API writes the answer to one request.

    headers: of a stream. ending: what ends a stream. named_events: whether an event's type is also its name.
    """

    headers: Mapping[str, str] = MappingProxyType({})
    ending = b"data: [DONE]\n\n"
    named_events = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.last: dict[int, Output] = {}
        """The last output of each choice for which `part` has returned."""

    @abstractmethod
    def whole(self, finals: Sequence[Output]) -> Any:
        """The body of an answer that is not streamed. finals: the final output of each choice."""

    def begin(self) -> Iterable[Event]:
        """The events before the first output."""
        return ()

    @abstractmethod
    def part(self, output: Output) -> Iterable[Event]:
        """The events for one output."""

    def end(self) -> Iterable[Event]:
        """The events after the last output."""
        return ()

    @abstractmethod
    def failed(self, message: str, status: int) -> Iterable[Event]:
        """The events of a stream that the engine refuses. May raise RefusedError instead."""

    @abstractmethod
    def refused(self, message: str, status: int) -> RefusedError:
        """The error for a request that the engine refuses."""

    def cached_tokens(self, output: Output) -> int:
        """The cached tokens of a prompt, as usage reports them: 0 without --enable-cache-report."""
        return output.sequence.cached_tokens if self._engine.settings.enable_cache_report else 0

    def new_text(self, output: Output) -> str:
        """The text of a choice since its last output."""
        last = self.last.get(output.choice)
        return output.text[len(last.text) if last else 0 :]


async def answer(
    http: web.Request, engine: Engine, requests: Iterable[EngineRequest], stream: bool, form: Form
) -> web.StreamResponse:
    """Answer with the outputs of these requests. Raises RefusedError."""
    if not stream:
        return json_response(form.whole(await final_outputs(engine, requests, form)))
    content_type = {"content-type": "text/event-stream; charset=utf-8"}
    response = web.StreamResponse(headers=content_type | dict(form.headers))
    events_left = http.get(DISCONNECT_AFTER_CHUNKS)
    async with aclosing(_events(engine, requests, form)) as events:
        async for event in events:
            if not response.prepared:
                await response.prepare(http)
            if events_left == 0 and http.transport:
                http.transport.abort()
                raise ConnectionResetError("injected disconnect")
            if events_left is not None:
                events_left -= 1
            name = f"event: {event['type']}\n".encode() if form.named_events else b""
            await response.write(name + b"data: " + orjson.dumps(event) + b"\n\n")
    await response.write(form.ending)
    await response.write_eof()
    return response


async def _events(
    engine: Engine, requests: Iterable[EngineRequest], form: Form
) -> AsyncGenerator[Event, None]:
    """The events of a stream."""
    for event in form.begin():
        yield event
    try:
        async with aclosing(engine.run(requests, stream=True)) as run:
            async for output in run:
                for event in form.part(output):
                    yield event
                form.last[output.choice] = output
        rest = form.end()
    except (ValueError, QueueFullError) as error:
        rest = form.failed(str(error), _status_of(error))
    for event in rest:
        yield event


async def final_outputs(engine: Engine, requests: Iterable[EngineRequest], form: Form) -> list[Output]:
    """The final output of each choice, in order. Raises RefusedError."""
    try:
        async with aclosing(engine.run(requests, stream=False)) as run:
            finals = [output async for output in run]
    except (ValueError, QueueFullError) as error:
        raise form.refused(str(error), _status_of(error)) from error
    return sorted(finals, key=lambda output: output.choice)


def _status_of(error: Exception) -> int:
    return 503 if isinstance(error, QueueFullError) else 400


def cached_tokens_details(sequence: EngineSequence, engine: Engine) -> dict[str, Any] | None:
    """The cached tokens by where they were found; None if there are none."""
    if not sequence.cached_tokens:
        return None
    stored = sequence.storage_tokens
    details: dict[str, Any] = {"device": sequence.cached_tokens - stored, "host": 0}
    if engine.storage is not None:
        details |= {"storage": stored, "storage_backend": BACKEND}
    return details


def accepted_drafts(output: Output, engine: Engine) -> dict[str, Any]:
    """How many drafts of a sequence were accepted; empty if none were verified."""
    sequence, speculation = output.sequence, engine.settings.time_model.speculation
    if speculation is None or not sequence.verify_steps:
        return {}
    proposed = sequence.verify_steps * (speculation.draft_tokens - 1)
    return {
        "spec_accept_rate": sequence.accepted_drafts / proposed if proposed else 0.0,
        "spec_accept_length": output.tokens / sequence.verify_steps,
        "spec_num_correct_drafts": sequence.accepted_drafts,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": sequence.verify_steps,
        "spec_correct_drafts_histogram": list(sequence.accepted),
    }
