"""A proxy that limits the length of answers.

The tiny model's random tokens never end an answer, and the checkers of APIs do not limit it.
"""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from e2e.real_sglang.messages import MESSAGES
from e2e.real_sglang.prompts import CHAT, COMPLETIONS
from e2e.real_sglang.responses import RESPONSES

ANSWER_TOKENS: Final = 8
LIMITS: Final = {
    CHAT: "max_tokens",
    COMPLETIONS: "max_tokens",
    MESSAGES: "max_tokens",
    RESPONSES: "max_output_tokens",
}
NOT_FORWARDED: Final = frozenset({"host", "content-length", "transfer-encoding", "connection"})


@asynccontextmanager
async def short_answers(url: str) -> AsyncIterator[str]:
    """The URL of a proxy in front of the server at `url`, whose answers have at most ANSWER_TOKENS tokens."""
    async with aiohttp.ClientSession(url, auto_decompress=False) as http:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = _limited(request.path, await request.read())
            headers = _forwarded(request.headers.items())
            async with http.request(request.method, request.rel_url, data=body, headers=headers) as answer:
                response = web.StreamResponse(
                    status=answer.status, headers=_forwarded(answer.headers.items())
                )
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                return response

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")


def _limited(path: str, body: bytes) -> bytes:
    limit = LIMITS.get(path)
    try:
        document = json.loads(body)
    except ValueError:
        return body
    if limit is None or not isinstance(document, dict):
        return body
    asked = document.get(limit, ANSWER_TOKENS)
    if not isinstance(asked, int):
        return body
    return json.dumps({**document, limit: min(ANSWER_TOKENS, asked)}).encode()


def _forwarded(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() not in NOT_FORWARDED]
