"""Requests for the metrics of a pod: a gateway or an engine."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, TypeVar

import aiohttp

from dps_operator.errors import UnreadableMetricsError

TIMEOUT_SECONDS: Final = 5.0
MAX_BODY_BYTES: Final = 8 << 20
"""Largest /metrics that is parsed. That of an engine can have hundreds of kilobytes."""
LARGE_BODY_BYTES: Final = 64 << 10
"""Above this size, parsing would occupy the event loop for a noticeable time: a megabyte takes about a second."""

Found = TypeVar("Found")


async def metrics_body(session: aiohttp.ClientSession, address: str, port: int) -> bytes:
    """/metrics of a pod, or its beginning if parsed() rejects it for its size.

    Raises aiohttp.ClientError or TimeoutError if the pod does not answer with status 200.
    """
    host = f"[{address}]" if ":" in address else address
    url, timeout = f"http://{host}:{port}/metrics", aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
    async with session.get(url, timeout=timeout, allow_redirects=False) as answer:
        if answer.status != HTTPStatus.OK:
            raise aiohttp.ClientResponseError(answer.request_info, answer.history, status=answer.status)
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                break
        return bytes(body)


async def parsed(body: bytes, parse: Callable[[str], Found]) -> Found:
    """What `parse` finds in /metrics of a pod. Raises UnreadableMetricsError.

    parse: reads Prometheus's text format; raises ValueError or LookupError if it cannot. A thread calls it if the body
    is large.
    """
    if len(body) > MAX_BODY_BYTES:
        raise UnreadableMetricsError(f"they are larger than {MAX_BODY_BYTES >> 20} MiB")
    try:
        text = body.decode()
        return await asyncio.to_thread(parse, text) if len(body) > LARGE_BODY_BYTES else parse(text)
    except (ValueError, LookupError) as error:
        raise UnreadableMetricsError("they are not as the operator expects") from error
