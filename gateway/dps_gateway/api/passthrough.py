"""The rest of the engines' API: forwarded unchanged and without a session to the less loaded pool."""

from typing import Final

from aiohttp import web

from dps_gateway.api.call import Call, handler
from dps_gateway.api.dispatch import Outbound, Placed, dispatch, least_loaded, placement_headers
from dps_gateway.api.errors import error_event
from dps_gateway.api.request import read_body
from dps_gateway.routing.decision import Decision, Reason
from dps_gateway.session.growth import History
from dps_gateway.upstream.exchange import UpstreamBroken, forwarded_headers

ROUTE: Final = "/v1/*"


async def _forward(call: Call) -> web.StreamResponse:
    runtime, request = call.runtime, call.request
    runtime.tenant(request.headers)
    body = await read_body(request) if request.can_read_body else None
    trace = runtime.tracing.propagate(call.span, request.headers)
    outbound = Outbound(
        method=request.method,
        path=request.raw_path,
        body=body,
        headers=lambda api_key: forwarded_headers(request.headers, api_key, trace, call.request_id),
        session=None,
        streamed=True,
        buffered=False,
    )
    placed = await dispatch(call, Decision(least_loaded(runtime.pools), Reason.FIXED), outbound)
    try:
        return await _relay(call, placed)
    finally:
        placed.close()


async def _relay(call: Call, placed: Placed) -> web.StreamResponse:
    answer = placed.answer
    response = web.StreamResponse(status=answer.status, headers=answer.headers())
    response.headers.update(placement_headers(call, placed))
    response.headers["x-dps-history"] = History.STATELESS.value
    await response.prepare(call.request)
    await response.write(answer.first)
    try:
        async for chunk in answer.rest():
            await response.write(chunk)
    except UpstreamBroken as error:
        if (
            not answer.streams
        ):  # close the connection, so that the client cannot mistake the body for a complete one
            raise ConnectionResetError(str(error)) from error
        await response.write(error_event(error))
    await response.write_eof()
    return response


pass_through: Final = handler(ROUTE, "relayed", _forward)
"""Handles every route of the engines that is not routed: /v1/models, /v1/embeddings, /v1/responses and others."""
