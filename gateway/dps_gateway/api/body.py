"""Reads the bodies of requests, parses their JSON, and encodes it for the engine."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, Self, TypeVar

import aiohttp
import orjson
from aiohttp import web

from dps_gateway.api.errors import BadRequest, Problem, Refused
from dps_gateway.config import GatewayConfig

BODY_GRACE_SECONDS: Final = 30.0
"""Time after which the body of a request must arrive at the minimum rate."""

MAX_VALUES: Final = 2_000_000
"""Approximate maximum number of values in a JSON body, among them token ids. A value that takes three bytes in the body
can take a hundred in memory, and parsing blocks the event loop."""

LONG_BODY_BYTES: Final = 256 * 1024
"""Rendering the chat of a body of this size can take more than 10 ms."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Body:
    """The JSON object of a request: `fields`, and the bytes to send, which are made from the client's when needed."""

    client: bytes
    """The body that the client sent."""
    fields: dict[str, Any]
    """The object, parsed."""
    _added: Mapping[str, Any] = field(default_factory=dict)
    """The fields that `client` lacks."""
    _replaced: tuple[str, ...] = ()
    """The fields that have other values in `client`."""

    @classmethod
    def parse(cls, client: bytes) -> Self:
        """Raises BadRequest if the body is no JSON object, or has more than MAX_VALUES values."""
        if len(client) > MAX_VALUES and sum(map(client.count, (b",", b"{", b"["))) > MAX_VALUES:
            raise BadRequest(f"the body has more than {MAX_VALUES} values")
        try:
            fields = orjson.loads(client)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from error
        if not isinstance(fields, dict):
            raise BadRequest("the body must be a JSON object")
        return cls(client, fields)

    def with_fields(self, fields: Mapping[str, Any]) -> Self:
        """The same object with other values of these fields."""
        replaced = tuple(name for name in fields if name in self.fields or not self.fields)
        return type(self)(
            self.client, {**self.fields, **fields}, {**self._added, **fields}, self._replaced + replaced
        )

    def encode(self) -> bytes:
        """The bytes to send. Those of the client are kept unless a field of theirs has been replaced.

        Raises BadRequest if the object cannot be serialized.
        """
        if self._replaced:
            try:
                return orjson.dumps(self.fields)
            except orjson.JSONEncodeError as error:
                # The object is nested too deeply for the encoder, but not for the decoder.
                names = " and ".join(self._replaced)
                raise BadRequest(f"the request cannot be serialized with another {names}: {error}") from error
        if not self._added:
            return self.client
        start = self.client.index(b"{") + 1
        return self.client[:start] + orjson.dumps(self._added)[1:-1] + b"," + self.client[start:]


async def in_thread_if_large(body: bytes, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work` on a body, which is done in a thread if the body is long.

    Parsing and serializing JSON hold Python's interpreter lock, so other requests wait for each of these steps, but are
    served between them.
    """
    if len(body) < LONG_BODY_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def read_body(request: web.Request, config: GatewayConfig, reserve: Callable[[int], None]) -> bytes:
    """The body of the request, decompressed. `reserve` is called with the size of each part before it is kept.

    Raises Refused if it exceeds limits.maxBodyBytes, if it takes longer than timeouts.bodySeconds or, after
    BODY_GRACE_SECONDS, arrives at less than limits.minBodyBytesPerSecond on average, and if it is incomplete.
    """
    max_bytes, rate = config.limits.max_body_bytes, config.limits.min_body_bytes_per_second
    body_seconds, began = config.timeouts.body_seconds, asyncio.get_running_loop().time()

    def ends(size: int) -> float:
        seconds = BODY_GRACE_SECONDS + size / rate if rate else body_seconds
        return began + min(body_seconds, seconds)

    too_large = Refused(
        Problem.BODY_TOO_LARGE, f"the request is larger than {max_bytes} bytes (limits.maxBodyBytes)"
    )
    if (request.content_length or 0) > max_bytes:
        raise too_large
    chunks, size = [], 0
    has_arrived = request.content.is_eof()  # most bodies have arrived with the head and need no timer
    try:
        async with asyncio.timeout_at(None if has_arrived else ends(0)) as limit:
            while chunk := await request.content.readany():
                size += len(chunk)
                if size > max_bytes:
                    raise too_large
                reserve(len(chunk))
                chunks.append(chunk)
                if not has_arrived:
                    limit.reschedule(ends(size))
    except (web.RequestPayloadError, aiohttp.ClientPayloadError) as error:
        raise BadRequest("the request body is incomplete or cannot be decompressed") from error
    except TimeoutError as error:
        seconds = asyncio.get_running_loop().time() - began
        raise Refused(
            Problem.BODY_TOO_SLOW,
            f"the body was incomplete after {seconds:.3g} s (timeouts.bodySeconds or limits.minBodyBytesPerSecond)",
        ) from error
    return b"".join(chunks)
