"""The management endpoints: models, server arguments, load, health, cache and metrics."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from dps_local.emulated_sglang.driver import Engine
from dps_local.emulated_sglang.faults import FaultInjection
from dps_local.emulated_sglang.http import error_response, json_response, read_body
from dps_local.emulated_sglang.settings import VERSION, EngineSettings
from dps_sglang.cache_salt import ANNOUNCEMENT, SALT_HEADER

LOAD_SECTIONS = frozenset({"core", "memory", "spec", "lora", "disagg", "queues", "all"})


class AbortRequest(BaseModel):
    """Body of /abort_request: abort all requests, or those whose id starts with `rid`."""

    rid: str = ""
    abort_all: bool = False


class InfoEndpoints:
    """All endpoints except inference."""

    def __init__(self, engine: Engine, settings: EngineSettings, faults: FaultInjection) -> None:
        self._engine = engine
        self._settings = settings
        self._faults = faults
        self._started = int(time.time())

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health, /health_generate, /ready and /ping: 200, or 503 while the faults set `ready` to false."""
        return web.Response(status=200 if self._faults.faults.ready else 503)

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
                "preferred_sampling_params": None,
                "weight_version": "default",
                "load_format": "dummy",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": "emulated",
                "architectures": ["EmulatedForCausalLM"],
            }
        )

    async def server_info(self, _request: web.Request) -> web.Response:
        """GET /server_info: server arguments, parameters of the emulation, and current state."""
        settings, metrics = self._settings, self._engine.metrics
        state: dict[str, Any] = {
            "last_gen_throughput": metrics.gen_throughput,
            "effective_max_running_requests_per_dp": self._engine.scheduler.max_running,
            "memory_usage": {"token_capacity": settings.max_total_tokens},
        }
        speculation = settings.time_model.speculation
        if speculation:
            state["avg_spec_accept_length"] = metrics.accept_length
        emulation = {
            "time_model": asdict(settings.time_model),
            "serialized_speculation": settings.serialized_speculation,
            "speed": settings.speed,
            "mean_answer_tokens": settings.mean_answer_tokens,
        }
        return json_response(
            {
                **settings.arguments,
                "model_path": settings.model_path,
                "served_model_name": settings.served_model_name,
                "tokenizer_path": settings.tokenizer_path,
                "host": settings.host,
                "port": settings.port,
                "context_length": settings.context_length,
                "page_size": settings.page_tokens,
                "max_running_requests": settings.max_running_requests,
                "max_total_num_tokens": settings.max_total_tokens,
                "max_req_input_len": settings.context_length - 6,
                "enable_cache_report": settings.enable_cache_report,
                "enable_response_store": settings.enable_response_store,
                "speculative_algorithm": speculation and speculation.algorithm,
                "speculative_num_steps": speculation and speculation.steps,
                "speculative_eagle_topk": speculation and speculation.top_k,
                "speculative_num_draft_tokens": speculation and speculation.draft_tokens,
                "random_seed": settings.seed,
                "internal_states": [state],
                "version": VERSION,
                ANNOUNCEMENT: SALT_HEADER,
                "emulated": True,
                "emulation": emulation,
            }
        )

    async def loads(self, request: web.Request) -> web.Response:
        """GET /v1/loads?include=core,memory,spec,queues."""
        include = request.query.get("include")
        sections = {section.strip() for section in include.split(",")} if include else {"all"}
        if not sections <= LOAD_SECTIONS:
            unknown = sections - LOAD_SECTIONS
            return error_response(
                f"Invalid include sections: {unknown}. Valid options: {sorted(LOAD_SECTIONS)}", "400"
            )
        load = self._core_load()
        load |= {field: section for field, name, section in self._load_sections() if sections & {"all", name}}
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": VERSION,
                "accelerator": None,
                "num_accelerators": 1,
                "loads": [load],
            }
        )

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

    def _core_load(self) -> dict[str, Any]:
        scheduler, metrics = self._engine.scheduler, self._engine.metrics
        waiting = scheduler.waiting
        waiting_tokens = sum(len(sequence.prompt) for sequence in waiting)
        waiting_cached_tokens = sum(scheduler.cached(sequence) for sequence in waiting)
        return {
            "timestamp": time.time(),
            "dp_rank": 0,
            "num_running_reqs": scheduler.running,
            "num_waiting_reqs": len(waiting),
            "num_waiting_uncached_tokens": waiting_tokens - waiting_cached_tokens,
            "num_used_tokens": scheduler.used_tokens,
            "num_total_tokens": scheduler.used_tokens + waiting_tokens,
            "num_active_tokens": scheduler.used_tokens + waiting_tokens,
            "num_prealloc_ready_tokens": 0,
            "max_total_num_tokens": scheduler.capacity,
            "max_running_requests": scheduler.max_running,
            "token_usage": scheduler.used_tokens / scheduler.capacity,
            "gen_throughput": metrics.gen_throughput if scheduler.running else 0.0,
            "cache_hit_rate": metrics.cache_hit_rate,
            "utilization": 0.0,
            "total_prefill_uncached_tokens": metrics.uncached_tokens,
            "total_prefill_busy_us": int(metrics.prefill_seconds * 1e6),
            "decode_moments": [0.0],
        }

    def _load_sections(self) -> tuple[tuple[str, str, Mapping[str, Any]], ...]:
        scheduler = self._engine.scheduler
        memory = {
            "weight_gb": 0.0,
            "kv_cache_gb": 0.0,
            "graph_gb": 0.0,
            "token_capacity": scheduler.capacity,
        }
        disaggregation = {
            "mode": "null",
            "prefill_bootstrap_queue_reqs": 0,
            "prefill_inflight_queue_reqs": 0,
            "decode_prealloc_queue_reqs": 0,
            "decode_transfer_queue_reqs": 0,
            "decode_retracted_queue_reqs": 0,
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        }
        metrics = self._engine.metrics
        speculative = {"accept_length": metrics.accept_length, "accept_rate": metrics.accept_rate}
        waiting = len(scheduler.waiting)
        queues = {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0}
        return (
            ("memory", "memory", memory),
            *((("speculative", "spec", speculative),) if self._settings.time_model.speculation else ()),
            ("disaggregation", "disagg", disaggregation),
            ("queues", "queues", queues),
        )
