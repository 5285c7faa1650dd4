"""The emulated SGLang server: an engine with SGLang's endpoints."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial

from aiohttp import web

from dps_local.emulated_sglang.clock import Clock
from dps_local.emulated_sglang.driver import Engine
from dps_local.emulated_sglang.faults import FaultInjection
from dps_local.emulated_sglang.flags import parse
from dps_local.emulated_sglang.http import Handler, acceptance, errors, require_api_key, starlette_headers
from dps_local.emulated_sglang.info import InfoEndpoints
from dps_local.emulated_sglang.messages_api import count_tokens, messages
from dps_local.emulated_sglang.native_api import generate
from dps_local.emulated_sglang.openai_api import chat, completions
from dps_local.emulated_sglang.prompt import Prompts
from dps_local.emulated_sglang.responses_api import ResponsesEndpoints
from dps_local.emulated_sglang.settings import EngineSettings

ENGINE = web.AppKey("engine", Engine)
MAX_BODY_BYTES = 256 * 1024 * 1024


def create_app(
    settings: EngineSettings, prompts: Prompts | None = None, clock: Clock | None = None
) -> web.Application:
    """The server's application. Raises ValueError if the tokenizer cannot be loaded.

    Serve it with `handler_cancellation=True`, as `serve` and aiohttp's TestServer do: then a client
    disconnect aborts the request, streaming or not.
    """
    prompts = prompts or Prompts.load(settings.tokenizer_path)
    engine = Engine(settings, prompts, clock or Clock(settings.speed))
    faults = FaultInjection(engine.storage)
    keys = [require_api_key(settings.api_key)] if settings.api_key else []
    app = web.Application(
        middlewares=[errors, *keys, faults.middleware, acceptance], client_max_size=MAX_BODY_BYTES
    )
    app[ENGINE] = engine
    app.on_response_prepare.append(starlette_headers)

    async def running(_app: web.Application) -> AsyncIterator[None]:
        engine.start()
        yield
        await responses.stop()
        await engine.stop()

    app.cleanup_ctx.append(running)
    responses = ResponsesEndpoints(engine)
    info = InfoEndpoints(engine)
    app.add_routes(
        [
            web.post("/v1/chat/completions", partial(chat, engine)),
            web.post("/v1/completions", partial(completions, engine)),
            web.post("/v1/messages", partial(messages, engine)),
            web.post("/v1/messages/count_tokens", partial(count_tokens, engine)),
            web.post("/v1/embeddings", info.embeddings),
            web.post("/v1/responses", responses.create),
            _get("/v1/responses/{id}", responses.retrieve),
            web.post("/v1/responses/{id}/cancel", responses.cancel),
            _get("/v1/models", info.models),
            _get("/v1/models/{model:.+}", info.model),
            _get("/v1/loads", info.loads),
            web.post("/generate", partial(generate, engine)),
            web.put("/generate", partial(generate, engine)),
            *(_get(path, info.health) for path in ("/health", "/health_generate", "/ready", "/ping")),
            *(_get(path, info.server_info) for path in ("/server_info", "/get_server_info")),
            *(_get(path, info.model_info) for path in ("/model_info", "/get_model_info")),
            _get("/flush_cache", info.flush_cache),
            web.post("/flush_cache", info.flush_cache),
            web.post("/abort_request", info.abort),
            web.get("/metrics", info.metrics),
            web.post("/emulate", faults.set),
        ]
    )
    return app


def _get(path: str, handler: Handler) -> web.RouteDef:
    """A route for GET requests. As in SGLang's FastAPI application, HEAD requests are answered with 405."""
    return web.get(path, handler, allow_head=False)


async def serve(settings: EngineSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises OSError if the port is in use."""
    runner = web.AppRunner(create_app(settings), handler_cancellation=True, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, shutdown_timeout=5).start()
        url = f"http://{settings.host}:{settings.port}"
        print(f"Emulated SGLang server listening on {url}", flush=True)
        stop = asyncio.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        await stop.wait()
    finally:
        await runner.cleanup()


def main(argv: list[str]) -> int:
    """Run `dps engine` until SIGINT or SIGTERM. Returns 0, or 1 if it cannot start."""
    settings = parse(argv)
    try:
        asyncio.run(serve(settings))
    except (OSError, ValueError) as error:
        print(f"dps engine: {error}", file=sys.stderr)
        return 1
    return 0
