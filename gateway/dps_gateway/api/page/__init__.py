"""The page on the admin port: its files, a stream of states and decisions, a search, and a simulation of alternatives.

It reads, and changes nothing. Its documents contain no prompts and no secrets.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import orjson
from aiohttp import hdrs, web

from dps_gateway import installed_version
from dps_gateway.api.call import RUNTIME
from dps_gateway.runtime import Runtime
from dps_gateway.telemetry.recent import Record
from dps_gateway.upstream.engine_pool import EnginePool
from dps_gateway.upstream.replica import Replica

STREAM_SECONDS: Final = 0.5
"""Time between two events of a stream."""

MAX_RECORDS_PER_EVENT: Final = 1000
"""Maximum number of records in an event. If more requests end within STREAM_SECONDS, only the newest are sent."""

MAX_SHOWN_IN_PROGRESS: Final = 200
"""The number of requests in progress that are shown, those that began first."""

MAX_SIMULATION_SECONDS: Final = 120.0
"""Maximum duration of one simulation."""

_SIMULATED_FIELDS: Final = ("time", "session", "turn", "prompt_tokens", "output_tokens", "total_seconds")
"""The fields of records that a simulation reads."""

_FILES: Final = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "views.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    hdrs.CACHE_CONTROL: "no-cache",
}
_CONTENT: Final = {name: (Path(__file__).parent / name).read_bytes() for name in _FILES}
_one_simulation = asyncio.Lock()


async def page_file(request: web.Request) -> web.Response:
    """A file of the page; index.html for `/`."""
    name = request.match_info.get("name", "index.html")
    if name not in _FILES:
        raise web.HTTPNotFound
    gateways = f"http://{request.url.host}:*"  # those that `?gateways=` may name
    policy = (
        f"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self' {gateways}; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {**_HEADERS, "Content-Security-Policy": policy}
    return web.Response(body=_CONTENT[name], content_type=_FILES[name], charset="utf-8", headers=headers)


async def live(request: web.Request) -> web.StreamResponse:
    """A stream of server-sent events, until the client disconnects: `state`, and `decisions` with new records.

    The id of an event is the number of the newest record that the client has. A client that connects first receives
    the newest records, and one that connects again those that it has missed.
    """
    runtime = request.app[RUNTIME]
    recent = runtime.recent
    last = request.headers.get("Last-Event-ID", "")
    # After a restart of the gateway, the client may know a higher number than there are records.
    seen = int(last) if last.isdecimal() and int(last) <= recent.added else 0
    response = web.StreamResponse(
        headers={
            hdrs.CONTENT_TYPE: "text/event-stream",
            hdrs.CACHE_CONTROL: "no-store",
            **_cors_headers(request),
        }
    )
    await response.prepare(request)
    with suppress(ConnectionResetError):
        while True:
            records, seen = recent.after(seen, MAX_RECORDS_PER_EVENT), recent.added
            state = orjson.dumps(state_document(runtime))
            event = b"event: state\ndata: " + state + b"\n\n"
            if records:
                event += b"event: decisions\nid: %d\ndata: %b\n\n" % (seen, _array(records))
            await response.write(event)
            await asyncio.sleep(STREAM_SECONDS)
    return response


async def records(request: web.Request) -> web.Response:
    """The records of `?session=ID` that are still in memory, oldest first."""
    found = request.app[RUNTIME].recent.of(request.query.get("session", ""))
    return web.Response(body=_array(found), content_type="application/json", headers=_cors_headers(request))


def _cors_headers(request: web.Request) -> dict[str, str]:
    """The headers (CORS) that let the page of another gateway read this one, at another port of the same host name."""
    origin = request.headers.get(hdrs.ORIGIN, "")
    scheme, _, host = origin.partition("://")
    if scheme != "http" or host.rpartition(":")[0] != request.host.rpartition(":")[0]:
        return {}
    return {
        hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: origin,
        hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS: "true",
        hdrs.VARY: hdrs.ORIGIN,
    }


def _array(records: Sequence[Record]) -> bytes:
    return orjson.dumps([record.document() for record in records])


def state_document(runtime: Runtime) -> dict[str, Any]:
    """What the page shows besides the records of decisions."""
    config, redis = runtime.config, runtime.redis
    progress = [request.progress() for request in runtime.recent.in_progress]
    progress.sort(key=lambda request: -request["seconds"])
    return {
        "time": time.time(),
        "version": installed_version(),
        "model": config.model.name,
        "ready": runtime.ready,
        "draining": runtime.draining,
        "policy": config.routing.policy,
        "thresholdTokens": config.routing.threshold_tokens,
        "configuredAt": runtime.configured_at,
        "configError": runtime.config_error,
        "redis": "none" if redis is None else "degraded" if redis.degraded else "ok",
        "mirrorRecords": len(runtime.mirror),
        "port": config.listen.port,
        "tls": config.listen.tls is not None,
        "authenticated": runtime.keys is not None,
        "traceUrl": config.telemetry.trace_url,
        "decisions": runtime.recent.added,
        "pools": {name.value: pool_document(pool) for name, pool in runtime.pools.items()},
        "inProgress": progress[:MAX_SHOWN_IN_PROGRESS],
        "inProgressTotal": len(progress),
    }


def pool_document(pool: EnginePool) -> dict[str, Any]:
    """A pool and its replicas."""
    return {
        "readyReplicas": len(pool.ready),
        "inFlight": pool.in_flight,
        "queued": pool.queued,
        "timeToFirstTokenSeconds": pool.time_to_first_token_seconds,
        "timePerOutputTokenSeconds": pool.time_per_output_token_seconds,
        "replicas": [
            {
                "id": replica.id,
                "url": replica.url,
                "ready": replica.ready,
                "state": _state(replica),
                "inFlight": replica.in_flight,
                "maxInFlight": pool.slots(replica),
            }
            for replica in pool.replicas.values()
        ],
    }


def _state(replica: Replica) -> str:
    if not replica.available:
        return "unavailable"
    if replica.hung:
        return "hung"
    if replica.ejected:
        return "ejected"
    return "probing" if replica.probing else "ready"


async def what_if(request: web.Request) -> web.Response:
    """Simulate the decisions in memory with the policy, threshold and fleet of the JSON object in the request.

    Another site cannot send it from a browser, because JSON as content type requires the permission of this server.
    """
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType
    try:
        result, status = await simulate(request.app[RUNTIME], orjson.loads(await request.read())), 200
    except ValueError as error:
        result, status = {"error": str(error)}, 422
    return web.Response(body=orjson.dumps(result), status=status, content_type="application/json")


async def simulate(runtime: Runtime, options: Any) -> dict[str, Any]:
    """The reports of `dps simulate` for the configuration in force (`now`), and for `options` (`then`).

    options: `policy`, `threshold` (a number of tokens or `none`) and `fleet`, as options of the command.
    Raises ValueError, whose message states why the simulation is not possible.
    """
    if find_spec("dps_lab") is None:
        raise ValueError(
            "the lab is not installed beside this gateway; save the decision log, and run 'dps simulate --workload "
            "FILE' where 'dps-router[lab]' is installed"
        )
    keys = ("policy", "threshold", "fleet")
    if not isinstance(options, dict) or not all(isinstance(options.get(key), str) for key in keys):
        raise ValueError(f"the request must be an object with the texts {', '.join(keys)}")
    # There may be thousands of them, and other requests are served meanwhile.
    turns = await asyncio.to_thread(_replayable, runtime.recent.after(0, runtime.recent.added))
    if not turns:
        raise ValueError("this gateway has no complete turns in memory")
    routing = runtime.config.routing
    in_force = {
        "policy": routing.policy,
        "threshold": "none" if routing.threshold_tokens is None else str(routing.threshold_tokens),
        "fleet": ",".join(f"{name}={max(1, len(pool.replicas))}" for name, pool in runtime.pools.items()),
    }
    with NamedTemporaryFile() as file:
        file.writelines(turns)
        file.flush()
        fixed = {
            "workload": file.name,
            "cache": "common" if routing.common_prefix_cache else "separate",
        }
        async with _one_simulation:
            return {
                "turns": len(turns),
                "now": await _report({**in_force, **fixed}),
                "then": await _report({**{key: options[key] for key in keys}, **fixed}),
            }


def _replayable(records: Sequence[Record]) -> list[bytes]:
    """A line of JSON for each record that has everything that a simulation needs."""
    documents = [record.document() for record in records]
    return [
        orjson.dumps({key: document[key] for key in _SIMULATED_FIELDS}) + b"\n"
        for document in documents
        if document["outcome"] == "complete" and None not in (document["turn"], document["output_tokens"])
    ]


async def _report(options: dict[str, str]) -> dict[str, Any]:
    """Raises ValueError with the command's own message."""
    command = ["nice", "-n", "19", sys.executable, "-P", "-m", "dps_cli", "simulate", "--json"]
    command += [f"--{name}={value}" for name, value in options.items()]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(MAX_SIMULATION_SECONDS):
            output, errors = await child.communicate()
    except TimeoutError:
        raise ValueError(f"the simulation took longer than {MAX_SIMULATION_SECONDS:g} s") from None
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode != 0:
        raise ValueError(errors.decode(errors="replace").strip().rpartition("\n")[2])
    report: dict[str, Any] = orjson.loads(output)
    return report
