"""The operator's HTTP endpoints: /healthz, /readyz and /metrics.

/healthz fails if the operator is stuck; /readyz fails until watches are established. Both succeed while another replica
holds the Lease.
"""

import asyncio
import time

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Gauge, generate_latest

from dps_operator.resync import Resync
from dps_operator.settings import Settings
from dps_operator.work_queue import WorkQueue

OLDEST = Gauge("dps_operator_oldest_pass_seconds", "Age of the oldest running reconcile")


def stuck_reason(queue: WorkQueue, resync: Resync, settings: Settings) -> str:
    """Why the operator should be restarted; empty if it should not. An unavailable API server is not a reason."""
    if queue.oldest_age() > settings.stuck_after:
        return f"a reconcile has been running for {queue.oldest_age():.0f} s"
    overdue = time.monotonic() - resync.alive - settings.resync_seconds
    if overdue > settings.stuck_after:
        return f"the listing is overdue by {overdue:.0f} s"
    return ""


def application(
    queue: WorkQueue, resync: Resync, leading: asyncio.Event, watching: asyncio.Event, settings: Settings
) -> web.Application:
    """The endpoints of an operator process.

    leading: set once this replica reconciles; until then it is ready, because another one does. watching: set while
    watches are established.
    """

    async def healthz(_: web.Request) -> web.Response:
        why = stuck_reason(queue, resync, settings) if leading.is_set() else ""
        return web.Response(text=why or "ok", status=500 if why else 200)

    async def readyz(_: web.Request) -> web.Response:
        ready = watching.is_set() or not leading.is_set()
        return web.Response(
            text="ok" if ready else "not watching the API server", status=200 if ready else 503
        )

    async def metrics(_: web.Request) -> web.Response:
        OLDEST.set(queue.oldest_age())
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    return app
