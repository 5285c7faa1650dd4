"""The management endpoints: models, server arguments, load, health, cache and metrics."""

import time
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from dps_local.emulated_sglang.driver import Engine
from dps_local.emulated_sglang.http import error_response, json_response, read_body
from dps_local.emulated_sglang.settings import VERSION
from dps_sglang.cache_salt import ANNOUNCEMENT, SALT_HEADER


class AbortRequest(BaseModel):
    """Body of /abort_request: abort all requests, or those whose id starts with `rid`."""

    rid: str = ""
    abort_all: bool = False


class InfoEndpoints:
    """All endpoints except inference."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._settings = engine.settings
        self._started = int(time.time())

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health, /health_generate, /ready and /ping."""
        return web.Response()

    async def models(self, _request: web.Request) -> web.Response:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        name = request.match_info["model"]
        if name == self._settings.served_model_name:
            return json_response(self._model_card())
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return json_response({"error": error}, 404)

    async def model_info(self, _request: web.Request) -> web.Response:
        """GET /model_info."""
        return json_response(
            {
                "model_path": self._settings.model_path,
                "served_model_name": self._settings.served_model_name,
                "tokenizer_path": self._settings.tokenizer_path,
                "is_generation": True,
                "weight_version": "default",
            }
        )

    async def server_info(self, _request: web.Request) -> web.Response:
        """GET /server_info: the command line, and what the emulation uses."""
        settings, speculation = self._settings, self._settings.time_model.speculation
        state = {"effective_max_running_requests_per_dp": self._engine.scheduler.max_running}
        return json_response(
            {
                **settings.arguments,
                "model_path": settings.model_path,
                "served_model_name": settings.served_model_name,
                "tokenizer_path": settings.tokenizer_path,
                "context_length": settings.context_length,
                "page_size": settings.page_tokens,
                "max_running_requests": settings.max_running_requests,
                "max_total_num_tokens": settings.max_total_tokens,
                "speculative_algorithm": speculation and speculation.algorithm,
                "internal_states": [state],
                "version": VERSION,
                ANNOUNCEMENT: SALT_HEADER,
                "emulated": True,
            }
        )

    async def loads(self, _request: web.Request) -> web.Response:
        """GET /v1/loads: what the gateway reads of it."""
        scheduler = self._engine.scheduler
        waiting = scheduler.waiting
        waiting_tokens = sum(len(sequence.prompt) for sequence in waiting)
        waiting_cached_tokens = sum(scheduler.cached(sequence) for sequence in waiting)
        load = {
            "dp_rank": 0,
            "num_running_reqs": scheduler.running,
            "num_waiting_reqs": len(waiting),
            "num_waiting_uncached_tokens": waiting_tokens - waiting_cached_tokens,
            "num_used_tokens": scheduler.used_tokens,
            "max_total_num_tokens": scheduler.capacity,
            "max_running_requests": scheduler.max_running,
        }
        return json_response({"version": VERSION, "loads": [load]})

    async def flush_cache(self, _request: web.Request) -> web.Response:
        """GET or POST /flush_cache: 400 while a request is running or queued."""
        if self._engine.scheduler.flush():
            return web.Response(
                body=b"Cache flushed.\nPlease check backend logs for more details. (When there are running "
                b"or waiting requests, the operation will not be performed.)\n"
            )
        return web.Response(body=b"Flush cache failed.\n", status=400)

    async def abort(self, request: web.Request) -> web.Response:
        """POST /abort_request."""
        body = await read_body(request, AbortRequest)
        if body.abort_all or body.rid:
            self._engine.abort_matching("" if body.abort_all else body.rid)
        return web.Response()

    async def metrics(self, _request: web.Request) -> web.Response:
        """GET /metrics."""
        return web.Response(
            body=self._engine.metrics.exposition(),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def embeddings(self, _request: web.Request) -> web.Response:
        """POST /v1/embeddings: an error, because a generation model has no embeddings."""
        return error_response(
            "This model does not appear to be an embedding model by default. Please add `--is-embedding` "
            "when launching the server or try another model."
        )

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._settings.served_model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "dps-engine (emulated)",
            "root": self._settings.served_model_name,
            "parent": None,
            "max_model_len": self._settings.context_length,
        }
