"""The rest of the engines' API: forwarded without a session to the less loaded pool."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote

import orjson
from aiohttp import hdrs, web

from dps_gateway.api.body import Body, in_thread_if_large, is_served, resolve_model, served_name
from dps_gateway.api.call import Call
from dps_gateway.api.dispatch import DISPATCH_ERRORS, Dispatch, find_stored_response, least_loaded, whole
from dps_gateway.api.endpoints import ENDPOINTS
from dps_gateway.api.endpoints.responses import RESPONSES
from dps_gateway.api.errors import BadRequest, Problem, Refused, error_event
from dps_gateway.api.relay import client_headers, send_complete
from dps_gateway.config import Model
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.exchange import SALT_HEADER, Outbound, UpstreamBroken, UpstreamFailed

RELAYED_GET: Final = ("/health_generate", "/model_info", "/server_info")

RELAYED_POST: Final = (
    "/tokenize",
    "/detokenize",
    "/encode",
    "/classify",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/pooling",
)
"""The endpoints of SGLang and vLLM outside /v1 that neither generate text nor change the engine."""

OTHER_LIST_SECONDS: Final = 5.0
"""The maximum time for which a client waits for the list of models of a second engine."""

_ADMINISTRATIVE: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""vLLM's endpoints below /v1 that change the engine for all clients."""

_CACHES_PROMPTS: Final = frozenset(
    {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/v1/decisions", "/v1/systemone"}
)
"""The relayed endpoints for which SGLang may prefill and cache prompts of a model that generates text."""

_WITHOUT_SCHEDULER: Final = frozenset({"/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"})
"""The relayed endpoints with bodies that the engine's HTTP server answers itself."""

_MODELS_PATH: Final = "/v1/models"

_VLLM: Final = "vllm"
"""The owner that vLLM states for its models."""

_INFO_PATH: Final = "/server_info"

_INFO_FIELDS: Final = frozenset(
    {
        "version",
        "served_model_name",
        "model_path",
        "tokenizer_path",
        "context_length",
        "max_total_num_tokens",
        "max_running_requests",
        "max_req_input_len",
        "chunked_prefill_size",
        "page_size",
        "tp_size",
        "dp_size",
        "dtype",
        "kv_cache_dtype",
        "quantization",
        "disable_radix_cache",
        "enable_cache_report",
        "random_seed",
        "speculative_algorithm",
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "internal_states",
    }
)
"""The fields of an engine's /server_info that clients may read. SGLang's answer contains all arguments of the server,
among them its API keys and the command line that it was started with."""

_INFO_STATE_FIELDS: Final = frozenset({"avg_spec_accept_length", "last_gen_throughput", "memory_usage"})

_ROUTED: Final = frozenset(endpoint.path for endpoint in ENDPOINTS)


def _decoded(raw_path: str) -> str:
    """The path of a request.

    Raises Refused for a path that an engine could resolve to another one, and for one that changes the engine.

    Without this check `/v1/../flush_cache` would reach the engine's administrative endpoints with the gateway's key,
    and `/v1/chat%2Fcompletions` would reach a routed endpoint while bypassing routing.
    """
    path = unquote(raw_path)
    # Some servers ignore parameters of a segment, which follow a semicolon.
    segments = [each.partition(";")[0] for each in path.replace("\\", "/").split("/")[1:]]
    if "\\" in path or "" in segments[:-1] or not {".", ".."}.isdisjoint(segments):
        raise BadRequest("the path must not contain backslashes, empty segments or dot segments")
    if path in _ROUTED and path != raw_path:
        raise BadRequest(f"write the path as {path}")
    if path.rstrip("/") in _ADMINISTRATIVE:
        raise Refused(Problem.NOT_FOUND, f"there is no endpoint {path}")
    return path


AnswerChange = Callable[[Sequence[bytes]], bytes]
"""Returns what the client receives instead of the answer of an engine, or of one in each pool. It raises ValueError if
an answer does not have the expected form."""


async def forward(call: Call) -> web.StreamResponse:
    """Serve a request of any endpoint that is not routed, such as /v1/models and /v1/embeddings.

    Raises as `inference.serve` does.
    """
    runtime, request = call.runtime, call.request
    if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
        # Codex then falls back to HTTP at once.
        raise Refused(Problem.UPGRADE_REFUSED, "the gateway serves no WebSockets; send the request over HTTP")
    call.decision = decision = Decision(least_loaded(runtime.pools), Reason.FIXED, stateless=True)
    call.authenticate()
    path, target = _decoded(request.rel_url.raw_path), request.rel_url.raw_path_qs
    # Engines refuse HEAD requests. The body is left out when the answer is sent.
    method = hdrs.METH_GET if request.method == hdrs.METH_HEAD else request.method
    change: AnswerChange | None = None
    if request.path == _INFO_PATH:
        change = _public_info
    elif method == hdrs.METH_GET:
        target, change = _models(call, path, target)
    body: bytes | None = None
    async with call.before_dispatch():
        if request.can_read_body and (body := await call.read()):
            body = await _checked_model(call, body)
        decision = Decision(least_loaded(runtime.pools), Reason.FIXED, stateless=True)
        response_id, replica = _response_id(path), None
        if response_id is not None:
            stored = await find_stored_response(call, response_id)
            decision, replica = replace(decision, pool=stored.pool), stored.url
    salt = runtime.cache_salt(call.tenant)
    added = runtime.tracing.propagate(call.span, request.headers)
    if salt is not None:
        added = {**added, SALT_HEADER: salt.of(None)}
    endpoint = path.rstrip("/")
    outbound = Outbound(
        method=method,
        path=target,
        body=body,
        headers=added,
        # After a timeout an engine may still be executing the request, so only reading requests are sent again.
        streamed=method == hdrs.METH_GET,
        buffered=False,
        salt_header=SALT_HEADER if endpoint in _CACHES_PROMPTS and runtime.separates_tenants else None,
        generates=method != hdrs.METH_GET and response_id is None and endpoint not in _WITHOUT_SCHEDULER,
        replica=replica,
    )
    with closing(Dispatch(call, decision, outbound)) as dispatch:
        await dispatch.first()
        others = []
        if change is not None and request.path != _INFO_PATH:
            others = await _models_of(call, runtime.pools[dispatch.pool.name.other], outbound)
        return await _relay(call, dispatch, change, others)


async def _models_of(call: Call, pool: EnginePool, outbound: Outbound) -> list[bytes]:
    """The models that an engine of this pool lists; empty if none is free, or it does not answer soon."""
    if not pool.has_room(generates=False):
        return []
    replica = min(pool.ready, key=lambda each: each.in_flight)
    decision = Decision(pool.name, Reason.FIXED, stateless=True)
    attempt = call.attempt
    try:
        async with asyncio.timeout(OTHER_LIST_SECONDS):
            with closing(Dispatch(call, decision, replace(outbound, replica=replica.url))) as dispatch:
                await dispatch.first()
                return [await whole(dispatch.answer)] if dispatch.answer.status == HTTPStatus.OK else []
    except (*DISPATCH_ERRORS, TimeoutError):
        return []
    finally:
        call.attempt = attempt


def _response_id(path: str) -> str | None:
    """The id in the path of a stored response, /v1/responses/ID or below; None for other paths."""
    root, *rest = path.split(f"{RESPONSES.path}/", 1)
    return rest[0].split("/")[0] if rest and not root else None


def _models(call: Call, path: str, target: str) -> tuple[str, AnswerChange | None]:
    """The target of the request, and how to change the answer if it asks for the models or for one of them.

    Raises Refused and Forbidden.
    """
    model, key = call.runtime.config.model, call.key
    limited = key.models if key is not None else None

    def permitted(name: str) -> bool:
        return limited is None or name in limited

    if path == _MODELS_PATH:
        return target, lambda contents: _model_list(model, contents, permitted)
    root, _, asked = path.partition(f"{_MODELS_PATH}/")
    if root or not asked:
        return target, None
    name = served_name(model, asked)
    if key is not None:
        key.check_models({"model": name}, model.name)
    return _MODELS_PATH, lambda contents: _model_card(model, contents, asked, name, permitted)


async def _checked_model(call: Call, body: bytes) -> bytes:
    """The body with its model's alias replaced. Raises Refused and Forbidden.

    A body that is not JSON, such as an audio file, names no model, and is refused only if the API key is limited to
    some models.
    """
    model, key = call.runtime.config.model, call.key
    limited = key is not None and key.models is not None
    if not limited and call.request.content_type != "application/json":
        return body
    parsed = resolve_model(model, await in_thread_if_large(body, Body.parse, body))
    if key is not None:
        key.check_models(parsed.fields, model.name)
    return await in_thread_if_large(body, parsed.encode)


def _model_list(model: Model, contents: Sequence[bytes], permitted: Callable[[str], bool]) -> bytes:
    """The list for a client: what all engines list, with names that requests may use, and the aliases.

    `contents` are the lists of at least one engine. `permitted` returns whether the client's API key may use the model
    of this name. Raises ValueError if one of `contents` is not a list of models.
    """
    listing, cards = _common_models(model, contents)
    cards |= {alias: cards[name] | {"id": alias} for alias, name in model.aliases.items() if name in cards}
    data = [card for name, card in cards.items() if permitted(model.aliases.get(name, name))]
    return orjson.dumps(listing | {"data": data})


def _model_card(
    model: Model, contents: Sequence[bytes], asked: str, name: str, permitted: Callable[[str], bool]
) -> bytes:
    """The entry for the model that a client has `asked` for, and whose name in requests is `name`.

    `contents` and `permitted` are described at `_model_list`. Raises Refused if one of the engines does not list
    the model, and ValueError if one of `contents` is not a list of models.
    """
    _, cards = _common_models(model, contents)
    if name not in cards:
        served = ", ".join(filter(permitted, cards))
        raise Refused(
            Problem.MODEL_NOT_FOUND, f"the model '{asked}' is not served; the served models are {served}"
        )
    return orjson.dumps(cards[name] | {"id": asked})


def _common_models(
    model: Model, contents: Sequence[bytes]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The first engine's list, and those of its entries that all engines have. See `_listed_models`."""
    (listing, cards), *others = [_listed_models(model, content) for content in contents]
    return listing, {name: card for name, card in cards.items() if all(name in each for _, each in others)}


def _listed_models(model: Model, content: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """An engine's list, and its entries by their names in requests. Raises ValueError.

    SGLang and vLLM list a LoRA adapter by its own name, with the model's name as its `parent`. In requests, SGLang
    expects `MODEL:ADAPTER`, and answers requests for the adapter's own name with the base model. vLLM expects the
    adapter's own name.
    """
    listing = orjson.loads(content)
    entries = listing.get("data") if isinstance(listing, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(each, dict) and isinstance(each.get("id"), str) for each in entries
    ):
        raise ValueError("the engine's answer is not a list of models")
    cards = {}
    base = next((each for each in entries if not each.get("parent")), None)
    if base is not None:  # the engine may serve the model under another name
        cards[model.name] = base | {"id": model.name}
    for entry in entries:
        adapter = bool(entry.get("parent")) and entry.get("owned_by") != _VLLM
        name = f"{model.name}:{entry['id']}" if adapter else entry["id"]
        if is_served(model, name):
            cards.setdefault(name, entry | {"id": name})
    return listing, cards


def _public_info(contents: Sequence[bytes]) -> bytes:
    """The fields of the one answer that contain no secret. Raises ValueError if it is not a JSON object."""
    (content,) = contents
    info = orjson.loads(content)
    if not isinstance(info, dict):
        raise ValueError("the engine's information is not a JSON object")
    public = _only(info, _INFO_FIELDS)
    states = public.pop("internal_states", None)
    if isinstance(states, list):
        public["internal_states"] = [
            _only(each, _INFO_STATE_FIELDS) for each in states if isinstance(each, dict)
        ]
    return orjson.dumps(public)


def _only(document: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name in names}


async def _relay(
    call: Call, dispatch: Dispatch, change: AnswerChange | None, others: Sequence[bytes]
) -> web.StreamResponse:
    """Send the answer to the client, changed together with the answers of `others`."""
    answer = dispatch.answer
    if change is not None and answer.status < 400:
        contents = [await whole(answer), *others]
        try:
            content = change(contents)
        except ValueError as error:
            raise UpstreamFailed("broken", "the engine's answer does not have the expected form") from error
        return await send_complete(call, answer, content)
    if answer.status >= 400 and not answer.streams:
        return await send_complete(call, answer, await whole(answer))
    response = web.StreamResponse(status=answer.status, headers=client_headers(answer))
    await call.start(response)
    await call.write(answer.first)
    try:
        async for chunk in answer.rest():
            await call.write(chunk)
    except UpstreamBroken as error:
        call.runtime.metrics.upstream_failures.labels(dispatch.pool.name.value, "broken").inc()
        if not answer.streams:
            call.status = HTTPStatus.BAD_GATEWAY
            # Closes the connection, so that the client cannot mistake the body for a complete one.
            raise ConnectionResetError(str(error)) from error
        # After an incomplete event, the error event would otherwise be a part of it.
        await call.write(b"\n\n" + error_event(error, call.errors))
    else:
        dispatch.record_success()
    await call.finish()
    return response
