"""A proxy for the API server that can inject faults."""

import asyncio
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp
import yaml
from aiohttp import web

from dps_local.processes import free_ports
from dps_testkit.cluster.kube import Kube
from dps_testkit.waiting import tls_connections_closed

Fault = Callable[[web.Request], int | None]
"""Returns the HTTP status for a request, or None to forward it. Status 0 closes the connection."""


class FaultyServer:
    """Forwards requests to the API server unless `fault` returns a status; counts the injected statuses."""

    def __init__(self, kube: Kube) -> None:
        cluster = yaml.safe_load(kube.kubeconfig.read_text())["clusters"][0]["cluster"]
        self._upstream: str = cluster["server"]
        self._trust = ssl.create_default_context(cafile=cluster["certificate-authority"])
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.fault: Fault = lambda _: None
        self.answered: Counter[int] = Counter()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        status = self.fault(request)
        if status is not None:
            self.answered[status] += 1
            if status == 0:
                if request.transport is not None:
                    request.transport.close()
                return web.Response(status=500)
            if status == 410:
                # An expired watch is reported by an event in a successful answer.
                gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                return web.json_response({"type": "ERROR", "object": gone})
            reason = {"kind": "Status", "message": f"injected failure with status {status}", "code": status}
            return web.json_response(reason, status=status)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(
                request.method,
                self._upstream + request.raw_path,
                headers=headers,
                data=await request.read() or None,
                ssl=self._trust,
            ) as answer,
        ):
            kept = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
            if "Content-Encoding" in answer.headers:
                kept["Content-Encoding"] = answer.headers["Content-Encoding"]
            relayed = web.StreamResponse(status=answer.status, headers=kept)
            await relayed.prepare(request)
            async for chunk in answer.content.iter_any():
                await relayed.write(chunk)
            return relayed

    async def _serve(self, up: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        up.set()
        await self._stop.wait()
        await runner.cleanup()
        await tls_connections_closed()

    @contextmanager
    def running(self) -> Iterator["FaultyServer"]:
        """Serve in a separate thread until the block exits."""
        up = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(up)))
        thread.start()
        up.wait(10)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()
