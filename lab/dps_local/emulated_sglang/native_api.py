"""/generate, SGLang's native endpoint: one prompt or a batch. Every event has the whole text, not a delta."""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web

from dps_local.emulated_sglang.answer import Event, Form, accepted_drafts, answer, cached_tokens_details
from dps_local.emulated_sglang.driver import Engine, EngineRequest, Output
from dps_local.emulated_sglang.generation import SamplingParams
from dps_local.emulated_sglang.http import (
    RefusedError,
    error_response,
    json_response,
    off_loop_if_long,
    read_body,
)
from dps_local.emulated_sglang.protocol import GenerateRequest


async def generate(engine: Engine, http: web.Request) -> web.StreamResponse:
    """POST or PUT /generate."""
    request = await read_body(http, GenerateRequest)
    try:
        requests, batched = await off_loop_if_long(http, partial(_requests, engine), request)
    except ValueError as error:
        raise _refused(str(error)) from error
    return await answer(http, engine, requests, request.stream, _Form(engine, batched))


def _requests(engine: Engine, request: GenerateRequest) -> tuple[list[EngineRequest], bool]:
    """The prompts, and whether the request is a batch. Raises ValueError."""
    if (request.text is None) == (request.input_ids is None):
        raise ValueError("Either text, input_ids or input_embeds should be provided.")
    inputs = request.input_ids if request.text is None else request.text
    assert inputs is not None
    prompts, batched = engine.prompts.encode_inputs(inputs)
    requested = request.sampling_params or SamplingParams()
    params = requested if isinstance(requested, list) else [requested] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError("The length of sampling_params should be equal to the batch size.")
    batched = batched or any(each.n > 1 for each in params)
    rids: list[str | None] = [request.rid] if isinstance(request.rid, str) else [*(request.rid or [])]
    rids = rids if len(rids) == len(prompts) else [None] * len(prompts)
    namespaces = request.namespaces(len(prompts), batch=batched)
    return list(map(EngineRequest, prompts, params, rids, namespaces)), batched


class _Form(Form):
    def __init__(self, engine: Engine, batched: bool) -> None:
        super().__init__(engine)
        self._batched = batched

    def whole(self, finals: Sequence[Output]) -> Any:
        answers = [self._answer(output) for output in finals]
        return answers if self._batched else answers[0]

    def part(self, output: Output) -> Iterable[Event]:
        yield self._answer(output) | ({"index": output.choice} if self._batched else {})

    def failed(self, message: str, status: int) -> Iterable[Event]:
        if status != HTTPStatus.BAD_REQUEST:
            reason = {"type": "abort", "status_code": status, "message": message}
            return [{"text": "", "output_ids": [], "meta_info": {"finish_reason": reason}}]
        error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
        return [{"error": error}]

    def refused(self, message: str, status: int) -> RefusedError:
        if status == HTTPStatus.BAD_REQUEST:
            return _refused(message)
        return RefusedError(message, error_response(message, str(status), status))

    def _answer(self, output: Output) -> Event:
        tokens = list(output.sequence.plan.token_ids[: output.tokens])
        return {"text": output.text, "output_ids": tokens, "meta_info": meta_info(output, self._engine)}


def _refused(message: str) -> RefusedError:
    return RefusedError(message, json_response({"error": {"message": message}}, 400))


def meta_info(output: Output, engine: Engine) -> dict[str, Any]:
    """The part of SGLang's `meta_info` that clients and the gateway read. Durations are in emulated seconds."""
    sequence = output.sequence
    info: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish_reason if output.finished else None,
        "completion_tokens": output.tokens,
    }
    if not sequence.aborted_in_queue:
        info |= {
            "prompt_tokens": len(sequence.prompt),
            "cached_tokens": sequence.cached_tokens,
            "cached_tokens_details": cached_tokens_details(sequence, engine),
        }
    if output.tokens <= 1 or output.finished:
        info["response_sent_to_client_ts"] = time.time()
    if output.finished and sequence.finished is not None:
        info["e2e_latency"] = sequence.finished - sequence.arrived
    if output.finished:
        info |= accepted_drafts(output, engine)
    return info
