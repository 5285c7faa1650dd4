"""Serving the routed endpoints: decide, dispatch to a replica, relay its answer."""

from contextlib import closing

from aiohttp import web
from opentelemetry.trace import SpanKind

from dps_gateway.api import spans
from dps_gateway.api.cache_salt import SALT_HEADER
from dps_gateway.api.call import Call, Handler, handler
from dps_gateway.api.dispatch import Dispatch, Outbound
from dps_gateway.api.endpoints.route import Route
from dps_gateway.api.long_bodies import off_loop
from dps_gateway.api.relay import Relay
from dps_gateway.api.request import urgency_of
from dps_gateway.api.routed_request import RoutedRequest, prepare
from dps_gateway.telemetry.tracing import fail_span
from dps_gateway.upstream.exchange import forwarded_headers


def routed_endpoint(route: Route) -> Handler:
    """The handler of a routed endpoint."""

    async def serve(call: Call) -> web.StreamResponse:
        return await _answer(await call.in_time(prepare(call, route)))

    return handler(route.path, route.path, serve)


async def _answer(routed: RoutedRequest) -> web.StreamResponse:
    call, route = routed.call, routed.route
    runtime, request = call.runtime, call.request
    model = runtime.config.model.name
    span = runtime.tracing.child(call.span, f"{route.operation} {model}", SpanKind.CLIENT)
    spans.describe_request(span, route.operation, runtime.engine.provider, routed.body, model)
    if routed.turn is not None:
        spans.describe_conversation(call.span, span, routed.turn.session.client_id)
    common = runtime.config.routing.common_prefix_cache
    body, requested = await off_loop(
        routed.raw, route.answers.request_usage, routed.body, routed.raw, sources=common
    )
    added = {**runtime.tracing.propagate(span, request.headers), **routed.headers}
    outbound = Outbound(
        method="POST",
        path=route.path,
        body=body,
        headers=lambda api_key: forwarded_headers(request.headers, api_key, added, call.request_id),
        session=routed.session,
        tenant=call.tenant,
        urgency=urgency_of(request, call.key),
        streamed=routed.body.get("stream") is True,
        buffered=True,
        prompt=routed.turn.cached if routed.turn is not None else None,
        salt_header=SALT_HEADER if SALT_HEADER in routed.headers and runtime.separates_tenants else None,
        replica=routed.stored.url if routed.stored is not None else None,
    )
    dispatch = Dispatch(call, routed.decision, outbound)
    try:
        with closing(Relay(routed, dispatch, await dispatch.first(), span, requested)) as relay:
            return await relay.run()
    except Exception as error:
        fail_span(span, error)
        raise
    finally:
        span.end()
