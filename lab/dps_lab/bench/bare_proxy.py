"""A minimal aiohttp proxy: forwards each request to the next of several upstreams and returns the response.

It does not parse requests and has no state, so it shows the minimum cost of a gateway based on aiohttp.
"""

import argparse
import itertools
from collections.abc import AsyncIterator

import aiohttp
import uvloop
from aiohttp import web

_UPSTREAM = web.AppKey("upstream", aiohttp.ClientSession)


def application(upstreams: list[str]) -> web.Application:
    """The proxy as an application. `upstreams` are base URLs, used in rotation."""
    targets = itertools.cycle(upstreams)

    async def relay(request: web.Request) -> web.StreamResponse:
        upstream = request.app[_UPSTREAM]
        body = await request.read()
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        url = next(targets) + request.path_qs
        async with upstream.request(request.method, url, data=body, headers=headers) as answer:
            kept = {"Content-Type": answer.headers["Content-Type"]}
            if answer.content_length is not None:
                return web.Response(body=await answer.read(), status=answer.status, headers=kept)
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    async def connect(app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            app[_UPSTREAM] = session
            yield

    app = web.Application(client_max_size=2**28)
    app.cleanup_ctx.append(connect)
    app.router.add_route("*", "/{path:.*}", relay)
    return app


def main() -> None:
    """`python -m dps_lab.bench.bare_proxy PORT UPSTREAM ...`"""
    parser = argparse.ArgumentParser(description="a bare aiohttp proxy")
    parser.add_argument("port", type=int)
    parser.add_argument("upstreams", nargs="+", metavar="UPSTREAM")
    arguments = parser.parse_args()
    web.run_app(
        application(arguments.upstreams),
        host="127.0.0.1",
        port=arguments.port,
        access_log=None,
        print=None,
        loop=uvloop.new_event_loop(),
    )


if __name__ == "__main__":
    main()
